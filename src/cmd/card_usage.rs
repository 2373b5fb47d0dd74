//! How to load what `tunesmith export` writes: the code on the model card, and the line that the command prints.
use std::path::Path;

use super::shell_quote::quoted;
use crate::config::arch::Arch;

/// The task of the model, as the Hugging Face Hub names it (`pipeline_tag`).
pub(super) fn task(arch: &Arch) -> &'static str {
    match (&arch.score, &arch.vision, arch.wrapper) {
        (Some(_), ..) => "text-classification",
        (None, Some(vision), _) if vision.chat.is_none() => "image-to-text",
        (None, None, None) => "text-generation",
        _ => "image-text-to-text",
    }
}

/// Python code that loads the folder `PATH`: a whole model, or an adapter for `base`, whose embeddings have more rows than the base's if
/// `grown`.
pub(super) fn code(arch: &Arch, adapter: bool, base: &str, grown: bool) -> String {
    let Some(class) = arch.auto_class() else {
        let folder = if adapter { "MERGED" } else { "PATH" };
        let first = if adapter { "# First merge the adapter: tunesmith merge CONFIG --output MERGED\n" } else { "" };
        let question =
            if arch.vision.as_ref().is_some_and(|vision| vision.chat.is_some()) { ", \"What is it?\"" } else { "" };
        return format!(
            "{first}# load_vision.py is in tunesmith's repository, in scripts/\nfrom load_vision import load, answer\n\n\
             model = load(\"{folder}\")\nprint(answer(model, \"image.jpg\"{question}))"
        );
    };
    let reader = if arch.vision.is_some() { "AutoProcessor" } else { "AutoTokenizer" };
    let name = if arch.vision.is_some() { "processor" } else { "tokenizer" };
    if !adapter {
        return format!(
            "from transformers import {class}, {reader}\n\nmodel = {class}.from_pretrained(\"PATH\")\n{name} = {reader}.from_pretrained(\"PATH\")"
        );
    }
    let scored = arch.score.is_some();
    let config = if scored { "AutoConfig, " } else { "" };
    let how = if scored { ", config=AutoConfig.from_pretrained(\"PATH\")" } else { "" };
    let base = serde_json::Value::from(base);
    let load = format!("base = {class}.from_pretrained({base}{how})\n");
    let last = "model = PeftModel.from_pretrained(base, \"PATH\")";
    if !grown {
        return format!("from transformers import {config}{class}\nfrom peft import PeftModel\n\n{load}{last}");
    }
    format!(
        "from transformers import {config}{class}, AutoTokenizer\nfrom peft import PeftModel\n\n\
         tokenizer = AutoTokenizer.from_pretrained(\"PATH\")\n{load}\
         if len(tokenizer) > base.get_input_embeddings().num_embeddings:\n    base.resize_token_embeddings(len(tokenizer))\n{last}"
    )
}

/// How to use the folder `dir`, in a line. What needs more than a text or a line has its code on the card.
pub(super) fn line(arch: &Arch, adapter: bool, dir: &str, grown: bool) -> String {
    if arch.auto_class().is_none() && !adapter {
        return format!("model.name={dir}, or in Python scripts/load_vision.py: load(\"{dir}\")");
    }
    let task = match task(arch) {
        task @ "text-generation" if !(adapter && grown) => task,
        task @ "text-classification" if !adapter && arch.wrapper.is_none() && arch.vision.is_none() => task,
        _ => return format!("{} has the code", Path::new(dir).join("README.md").display()),
    };
    // A JSON string is one of Python's too.
    let dir = serde_json::Value::from(dir);
    let code = format!("from transformers import pipeline; print(pipeline(\"{task}\", {dir})(\"Hello\"))");
    format!("python3 -c {}", quoted(&code))
}
