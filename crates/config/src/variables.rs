//! Environment variables of other programs that have an effect here.
use super::lookup::{find, takes};
use super::resolver::Resolver;
use super::source::Source;
use super::value::Node;
use tunesmith_base::error::Result;

impl Resolver {
    /// NCCL's variables. `NCCL_TIMEOUT`, in seconds, becomes `train.ddp_timeout` if nothing else sets that. NCCL reads the others itself;
    /// a note names them where ranks do not use it.
    ///
    /// # Errors
    /// Those of [`Resolver::put`]. A value that is not a time is not an error: a note names it.
    pub(super) fn of_nccl(&mut self, env: &[(String, String)]) -> Result<()> {
        const TIMEOUT: &str = "NCCL_TIMEOUT";
        const KEY: &str = "train.ddp_timeout";
        let given = |name: &str| env.iter().find(|(key, value)| key == name && !value.is_empty());
        if let (Some((_, text)), false, Some(def)) = (given(TIMEOUT), self.found.contains_key(KEY), find(KEY)) {
            let seconds = text.trim().parse::<f64>().ok().map(Node::Float);
            match seconds.filter(|node| takes(KEY, node)) {
                Some(node) => {
                    self.put(def, KEY, node, Source::Env(TIMEOUT.to_owned()))?;
                    self.notes.push(format!("env {TIMEOUT}={text}: read as {KEY}, in seconds"));
                }
                None => self.notes.push(format!("env {TIMEOUT} is ignored: expected seconds, found {text:?}")),
            }
        }
        let is = |key: &str, word: &str| {
            self.found.get(key).is_some_and(|found| matches!(&found.node, Node::Str(value) if value == word))
        };
        // Ranks on GPUs decide when they meet.
        let on_gpus = self.found.contains_key("model.device") && !is("model.device", "cpu");
        if is("train.ddp_backend", "nccl") || on_gpus && !is("train.ddp_backend", "gloo") {
            return Ok(());
        }
        let others = env.iter().filter(|(name, value)| {
            (name.starts_with("NCCL_") || name.starts_with("TORCH_NCCL_")) && name != TIMEOUT && !value.is_empty()
        });
        let names: Vec<&str> = others.map(|(name, _)| name.as_str()).collect();
        if !names.is_empty() {
            self.notes.push(format!(
                "env {}: NCCL reads {} with train.ddp_backend: nccl only; not needed: these ranks talk over Gloo",
                names.join(", "),
                if names.len() == 1 { "it" } else { "them" },
            ));
        }
        Ok(())
    }
}
