//! gpt-oss's experts as Unsloth stores them: each expert is a list entry with linear layers, which bitsandbytes has
//! quantized. Opening the files gives each part of an expert the name that the engine has for it. The rows of gate and
//! up alternate.
//!
//! ```text
//! mlp.experts.gate_up_projs.N.weight [2I, H]   gate i in row 2i, up i in row 2i + 1; as NF4, or as it is
//! mlp.experts.gate_up_projs.N.bias [2I]        likewise
//! mlp.experts.down_projs.N.weight [H, I], bias [H]
//! mlp.router.linear.weight, bias
//! ```
use super::WeightFiles;
use super::format::{Entry, View};
use super::quantized::{QuantizedTensor, RowsTensor};
use tunesmith_base::error::Result;

/// The parts of `gate_up_projs` and `down_projs`, and which rows they have: the first, and the step to the next.
const GATE_UP: [(&str, usize, usize); 2] = [("gate_proj", 0, 2), ("up_proj", 1, 2)];
const DOWN: [(&str, usize, usize); 1] = [("down_proj", 0, 1)];

impl WeightFiles {
    /// Gives the parts of listed experts the engine's names. Tensors of another shape stay as they are.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: a part is there twice.
    pub(super) fn unlist(&mut self) -> Result<()> {
        let names: Vec<String> = self.entries.keys().cloned().collect();
        for name in &names {
            let listed = name.rsplit_once(".mlp.experts.").and_then(|(block, rest)| {
                let (list, rest) = rest.split_once('.')?;
                let (expert, end) = rest.split_once('.')?;
                let parts = match list {
                    "gate_up_projs" => &GATE_UP[..],
                    "down_projs" => &DOWN[..],
                    _ => return None,
                };
                let number = expert.bytes().all(|byte| byte.is_ascii_digit()) && ["weight", "bias"].contains(&end);
                number.then(|| (format!("{block}.mlp.experts.{expert}"), parts, end))
            });
            if let Some((expert, parts, end)) = listed {
                self.unlist_expert(name, &expert, parts, end)?;
            } else if let Some((block, end)) = name.split_once(".mlp.router.linear.")
                && let Some(entry) = self.entries.remove(name)
            {
                self.put(format!("{block}.mlp.router.{end}"), entry, name)?;
            }
        }
        Ok(())
    }

    fn unlist_expert(&mut self, name: &str, expert: &str, parts: &[(&str, usize, usize)], end: &str) -> Result<()> {
        let Some(entry) = self.entries.get(name).cloned() else { return Ok(()) };
        let quantized = self.quantized.get(name).map(|quantized| quantized.shape().to_vec());
        let shape = quantized.clone().unwrap_or_else(|| entry.shape.clone());
        // A matrix or a bias, with numbers in it.
        let fits = (1..=2).contains(&shape.len()) && !shape.contains(&0);
        let Some((&rows, rest)) = shape.split_first().filter(|(rows, _)| fits && rows.is_multiple_of(parts.len()))
        else {
            return Ok(());
        };
        let (rows, columns) = (rows / parts.len(), rest.first().copied().unwrap_or(1));
        for &(part, first, step) in parts {
            let to = format!("{expert}.{part}.{end}");
            if let (Some(_), Some(format), &[columns]) = (&quantized, self.format_of(name), rest) {
                let whole = name.to_owned();
                let tensor = RowsTensor { whole, format, shape: [rows, columns], first, step };
                self.put(to.clone(), entry.clone(), name)?;
                self.quantized.insert(to, QuantizedTensor::Rows(tensor));
                continue;
            }
            let shape = [&[rows], rest].concat();
            let view = Some(View { first: first * columns, row: step * columns, column: 1 });
            self.put(to, Entry { shape, view, ..entry.clone() }, name)?;
        }
        if quantized.is_none()
            && let Some(entry) = self.entries.remove(name)
        {
            self.stacked.insert(name.to_owned(), entry);
        }
        Ok(())
    }
}
