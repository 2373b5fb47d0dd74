//! Experts that a file holds stacked, in one tensor for all experts of a block. Opening the file gives each expert's
//! part the name that the engine has for it.
//!
//! gpt-oss's are transposed, and gate and up alternate (`E` experts, hidden size `H`, width `I`):
//!
//! ```text
//! mlp.experts.gate_up_proj [E, H, 2I]          gate i in column 2i, up i in column 2i + 1
//! mlp.experts.gate_up_proj_bias [E, 2I]        likewise
//! mlp.experts.down_proj [E, I, H], down_proj_bias [E, H]
//! mlp.experts.gate_up_proj_blocks [E, 2I, H/32, 16], _scales [E, 2I, H/32], and of down_proj [E, H, I/32, ..]: MXFP4, by rows
//! ```
//!
//! Those of other families are not transposed, and the gate's rows come before the up's:
//! `experts.gate_up_proj [E, 2I, H]` and `experts.down_proj [E, H, I]`, in Granite 4 `input_linear.weight` and
//! `output_linear.weight`. Files of such a family may have stacked tensors or separate matrices; a model is written in
//! the form in which it was read.
//!
//! GPT-2's matrices are transposed too, each by itself: `[in, out]`, where the engine has `[out, in]` under the same name.
use super::format::{Entry, View};
use super::quantized::{MxTensor, QuantizedTensor};
use super::{Dtype, Numbers, WeightFiles};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use tunesmith_base::error::Result;
use tunesmith_config::arch::{Arch, Experts, TensorSpec};
use tunesmith_ops::quant::{Four, MX_BLOCK, Quantized};

/// A part of an expert: its name, its first column or row in the stacked tensor, and the step to the next.
type Part = (&'static str, usize, usize);

/// A stacked tensor: the end of its name, and the parts that an expert has in it.
type Stacked = (&'static str, &'static [Part]);

/// gpt-oss's stacked tensors, by the ends of their names. For each: the names of an expert's parts, the first column or
/// row of a part, and the step to the next.
const STACKED: [Stacked; 4] = [
    ("gate_up_proj", &[("gate_proj.weight", 0, 2), ("up_proj.weight", 1, 2)]),
    ("down_proj", &[("down_proj.weight", 0, 1)]),
    ("gate_up_proj_bias", &[("gate_proj.bias", 0, 2), ("up_proj.bias", 1, 2)]),
    ("down_proj_bias", &[("down_proj.bias", 0, 1)]),
];

/// Stands for the number of a block in [`IN_ROWS`].
const BLOCK: &str = "0";

/// Stacked tensors that are not transposed: the rows of an expert lie as in its own matrix.
struct InRows {
    /// The last part of the name of the module that has the experts.
    feed: &'static str,
    /// The names of the two tensors within it. For each: the names of an expert's parts, which lie one after the other.
    tensors: [(&'static str, &'static [&'static str]); 2],
}

/// A family whose files have the stacked names that Transformers 5 uses in memory.
const fn usual(feed: &'static str, gate_up: &'static [&'static str], down: &'static [&'static str]) -> InRows {
    InRows { feed, tensors: [("experts.gate_up_proj", gate_up), ("experts.down_proj", down)] }
}

const GATE_UP: &[&str] = &["gate_proj.weight", "up_proj.weight"];
const DOWN: &[&str] = &["down_proj.weight"];

/// All such. Gemma 4's experts are in the block itself; Granite 4's differ from Mixtral's; Nemotron-H's have no gate.
const IN_ROWS: [InRows; 6] = [
    usual("mlp", GATE_UP, DOWN),
    usual(BLOCK, GATE_UP, DOWN),
    usual("feed_forward", &["w1.weight", "w3.weight"], &["w2.weight"]),
    usual("block_sparse_moe", &["w1.weight", "w3.weight"], &["w2.weight"]),
    InRows { feed: "mixer", tensors: [("experts.up_proj", &["up_proj.weight"]), ("experts.down_proj", DOWN)] },
    InRows { feed: "block_sparse_moe", tensors: [("input_linear.weight", GATE_UP), ("output_linear.weight", DOWN)] },
];

impl InRows {
    /// Whether a module such as `model.layers.0.mlp` is of this kind.
    fn is_of(&self, module: &str) -> bool {
        let last = module.rsplit('.').next().unwrap_or(module);
        let last = if last.bytes().all(|letter| letter.is_ascii_digit()) { BLOCK } else { last };
        self.feed == last
    }
}

/// For a stacked tensor that is not transposed: the module of the experts, and the names of an expert's parts.
fn of_rows(name: &str) -> Option<(String, &'static [&'static str])> {
    IN_ROWS.iter().find_map(|rows| {
        rows.tensors.iter().find_map(|(end, parts)| {
            let module = name.strip_suffix(end)?.strip_suffix('.').filter(|module| rows.is_of(module))?;
            Some((format!("{module}.experts"), *parts))
        })
    })
}

/// The stacked tensor that a part of an expert belongs to, in files that stack experts.
fn stacked_of(name: &str) -> Option<String> {
    let (module, rest) = name.rsplit_once(".experts.")?;
    let (_, part) = rest.split_once('.')?;
    let mut all = IN_ROWS.iter().filter(|rows| rows.is_of(module)).flat_map(|rows| &rows.tensors);
    let (end, _) = all.find(|(_, parts)| parts.contains(&part))?;
    Some(format!("{module}.{end}"))
}

/// Whether the experts are gpt-oss's, by the name of the router beside them. `has` says whether a tensor is there.
fn are_gpt_oss(experts: &str, has: impl Fn(&str) -> bool) -> bool {
    experts.strip_suffix(".experts").is_some_and(|feed| has(&format!("{feed}.router.weight")))
}

/// The part of a stacked tensor that belongs to one of `count` experts.
fn stretch(entry: &Entry, expert: usize, count: usize, shape: Vec<usize>) -> Entry {
    let bytes = (entry.end - entry.begin) / count as u64;
    let begin = entry.begin + bytes * expert as u64;
    Entry { begin, end: begin + bytes, shape, ..entry.clone() }
}

/// Whether the tensor of that name is one of gpt-oss's stacked ones, by the name in its files.
fn is_stacked(name: &str) -> bool {
    let end = name.rsplit_once(".mlp.experts.").map(|(_, end)| end);
    let end = end.map(|end| end.trim_end_matches("_blocks").trim_end_matches("_scales"));
    end.is_some_and(|end| STACKED.iter().any(|(name, _)| *name == end))
}

/// GPT-2's matrices, which files hold transposed, by the ends of their names in a block.
const TRANSPOSED: [&str; 7] = [
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "crossattention.c_attn.weight",
    "crossattention.c_proj.weight",
    "crossattention.q_attn.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
];

/// Whether the tensor of that name is a transposed matrix in files.
pub(super) fn is_transposed(name: &str) -> bool {
    let rest = name.strip_prefix("model.layers.").and_then(|rest| Some(rest.split_once('.')?.1));
    rest.is_some_and(|rest| TRANSPOSED.contains(&rest))
}

/// A limit on the experts of a block, larger than that of any real model.
const MAX_EXPERTS: usize = 1 << 16;

/// The block of a tensor of its experts, and what follows `mlp.experts.`.
fn of_experts(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once(".mlp.experts.")
}

/// The names of the tensors that a model needs, where they are known.
type Known<'a> = Option<BTreeSet<&'a str>>;

impl WeightFiles {
    /// Gives the parts of stacked tensors the engine's names. Tensors of another shape stay as they are, and so do
    /// those whose parts are not among the `expected` tensors, if these are known.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: a part is there twice, another number of experts than expected, or a dtype in
    /// which stacked experts are not read.
    pub(super) fn unstack(&mut self, expected: Option<&[TensorSpec]>) -> Result<()> {
        let known: Known<'_> = expected.map(|specs| specs.iter().map(|spec| spec.name.as_str()).collect());
        let stacked: Vec<String> = self.entries.keys().filter(|name| is_stacked(name)).cloned().collect();
        for name in stacked {
            let Some((block, end)) = of_experts(&name) else { continue };
            if !self.entries.contains_key(&format!("{block}.mlp.router.weight")) {
                continue;
            }
            let experts = format!("{block}.mlp.experts");
            let parts = |plain: &str| STACKED.iter().find(|(of, _)| *of == plain).map(|(_, parts)| *parts);
            let found = match (end.strip_suffix("_blocks"), end.strip_suffix("_scales")) {
                (Some(plain), _) => match parts(plain) {
                    Some(parts) => self.unstack_mxfp4(&name, &experts, plain, parts, &known)?,
                    None => false,
                },
                // Goes with the codes.
                (None, Some(plain)) => self.stacked.contains_key(&format!("{experts}.{plain}_blocks")),
                (None, None) => match parts(end) {
                    Some(parts) => self.unstack_plain(&name, &experts, parts, &known)?,
                    None => false,
                },
            };
            // A tensor whose parts were not found stays, so that it is refused as no part of the model.
            if found && let Some(entry) = self.entries.remove(&name) {
                self.stacked.insert(name, entry);
            }
        }
        self.unstack_rows(&known)?;
        self.transpose();
        Ok(())
    }

    /// Whether the tensor `name` is one of `count` experts, of whose parts one is `part`. A tensor without numbers is
    /// not, since it may claim any count.
    fn holds_experts(&self, name: &str, experts: &str, part: &str, count: usize, known: &Known<'_>) -> Result<bool> {
        let Some(entry) = self.entries.get(name).filter(|entry| entry.len() > 0) else { return Ok(false) };
        let Some(known) = known else { return Ok((1..=MAX_EXPERTS).contains(&count)) };
        let is_known = |expert: &usize| known.contains(format!("{experts}.{expert}.{part}").as_str());
        match (0..MAX_EXPERTS).take_while(is_known).count() {
            0 => Ok(false),
            expected if expected == count => Ok(true),
            expected => {
                let found = format!("({:?}) holds {count} experts, expected {expected}", entry.shape);
                Err(self.fail(entry, name, found).hint("config.json and the weights must belong to one model"))
            }
        }
    }

    /// Refuses stacked experts in a dtype in which they cannot be read.
    fn expect_floats(&self, name: &str, entry: &Entry) -> Result<()> {
        if Dtype::parse(&entry.dtype).is_some() {
            return Ok(());
        }
        let what = if entry.dtype.starts_with("F8_") { "FP8".to_owned() } else { entry.dtype.clone() };
        let message = format!("is {}: experts stacked in one tensor are not read in {what} yet", entry.dtype);
        Err(self
            .fail(entry, name, message)
            .hint("use a checkpoint that stores each expert by itself, or the unquantized model (F32, BF16 or F16)"))
    }

    /// Adds a tensor that the files hold under the name `stored`. It must not be there already.
    pub(super) fn put(&mut self, name: String, entry: Entry, stored: &str) -> Result<()> {
        if let Some(twice) = self.entries.get(&name) {
            return Err(self.fail(twice, &name, format!("is there twice: {stored:?} holds the same numbers")));
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    /// Lets matrices that the files hold transposed be read as the engine has them. Quantized matrices are never
    /// transposed.
    fn transpose(&mut self) {
        let names: Vec<String> = self.entries.keys().filter(|name| is_transposed(name)).cloned().collect();
        for name in names.into_iter().filter(|name| !self.quantized.contains_key(name)) {
            let Some(entry) = self.entries.get_mut(&name) else { continue };
            let &[inputs, outputs] = entry.shape.as_slice() else { continue };
            let stored = entry.clone();
            entry.shape = vec![outputs, inputs];
            entry.view = Some(View { first: 0, row: 1, column: outputs });
            self.stacked.insert(name, stored);
        }
    }

    /// As [`WeightFiles::unstack`], for stacked tensors that are not transposed.
    fn unstack_rows(&mut self, known: &Known<'_>) -> Result<()> {
        let stacked: Vec<String> = self.entries.keys().filter(|name| of_rows(name).is_some()).cloned().collect();
        for name in stacked {
            let Some(((experts, parts), entry)) = of_rows(&name).zip(self.entries.get(&name).cloned()) else {
                continue;
            };
            let &[count, rows, columns] = entry.shape.as_slice() else { continue };
            let fits = rows.is_multiple_of(parts.len())
                && !are_gpt_oss(&experts, |router| self.entries.contains_key(router))
                && self.holds_experts(&name, &experts, parts.first().unwrap_or(&""), count, known)?;
            if !fits {
                continue;
            }
            self.expect_floats(&name, &entry)?;
            for expert in 0..count {
                for (index, part) in parts.iter().enumerate() {
                    let (part_of, all) = (expert * parts.len() + index, count * parts.len());
                    let own = stretch(&entry, part_of, all, vec![rows / parts.len(), columns]);
                    self.put(format!("{experts}.{expert}.{part}"), own, &name)?;
                }
            }
            self.entries.remove(&name);
            self.stacking.0.insert(name.clone());
            self.stacked.insert(name, entry);
        }
        Ok(())
    }

    /// Whether a tensor is a part of a stacked one that is not transposed.
    pub(super) fn is_of_rows(&self, name: &str) -> bool {
        stacked_of(name).is_some_and(|stacked| self.stacking.0.contains(&stacked))
    }

    /// Which experts the files hold stacked.
    pub const fn stacking(&self) -> &Stacking {
        &self.stacking
    }

    fn unstack_plain(&mut self, name: &str, experts: &str, parts: &[Part], known: &Known<'_>) -> Result<bool> {
        let Some(entry) = self.entries.get(name).cloned() else { return Ok(false) };
        let step = parts.len();
        // A matrix is transposed; a bias is a row.
        let (count, shape, row, column) = match *entry.shape {
            [count, columns, width] if width.is_multiple_of(step) => (count, vec![width / step, columns], step, width),
            [count, width] if width.is_multiple_of(step) => (count, vec![width / step], step, 0),
            _ => return Ok(false),
        };
        let part = parts.first().map_or("", |(part, ..)| part);
        if !self.holds_experts(name, experts, part, count, known)? {
            return Ok(false);
        }
        self.expect_floats(name, &entry)?;
        for expert in 0..count {
            for &(part, first, _) in parts {
                let own = stretch(&entry, expert, count, shape.clone());
                let view = Some(View { first, row, column });
                self.put(format!("{experts}.{expert}.{part}"), Entry { view, ..own }, name)?;
            }
        }
        Ok(true)
    }

    fn unstack_mxfp4(
        &mut self,
        name: &str,
        experts: &str,
        plain: &str,
        parts: &[Part],
        known: &Known<'_>,
    ) -> Result<bool> {
        let entry = |end: &str| self.entries.get(&format!("{experts}.{plain}_{end}")).cloned();
        let (Some(codes), Some(scales)) = (entry("blocks"), entry("scales")) else { return Ok(false) };
        let &[count, all, blocks, bytes] = codes.shape.as_slice() else { return Ok(false) };
        let fits = scales.shape == [count, all, blocks] && bytes == MX_BLOCK / 2 && all.is_multiple_of(parts.len());
        let are_bytes = codes.dtype == "U8" && scales.dtype == "U8";
        let part = parts.first().map_or("", |(part, ..)| part);
        if !fits || !are_bytes || !self.holds_experts(name, experts, part, count, known)? {
            return Ok(false);
        }
        let shape = [all / parts.len(), blocks * MX_BLOCK];
        for expert in 0..count {
            for &(part, first, step) in parts {
                let [codes, scales] = [&codes, &scales].map(|entry| stretch(entry, expert, count, shape.to_vec()));
                let own = format!("{experts}.{expert}.{part}");
                let tensor = MxTensor { shape, codes: codes.clone(), scales, first, step };
                self.put(own.clone(), codes, name)?;
                self.quantized.insert(own, QuantizedTensor::Mx(tensor));
            }
        }
        Ok(true)
    }

    /// Fills `out` with the numbers of a view from `first` on.
    pub(super) fn read_view(
        &self,
        entry: &Entry,
        dtype: Dtype,
        view: View,
        first: usize,
        out: &mut [f32],
    ) -> io::Result<()> {
        let (size, columns) = (dtype.bytes(), if entry.shape.len() > 1 { entry.shape[1] } else { 1 });
        let mut stretch = Vec::with_capacity((entry.end - entry.begin) as usize);
        self.chunks(entry, |bytes| stretch.extend_from_slice(bytes))?;
        let mut own = vec![0; size * out.len()];
        for (index, to) in own.chunks_exact_mut(size).enumerate() {
            let (row, column) = ((first + index) / columns, (first + index) % columns);
            let from = size * (view.first + row * view.row + column * view.column);
            to.copy_from_slice(&stretch[from..from + size]);
        }
        dtype.widen(&own, out);
        Ok(())
    }

    /// The stacked tensors in MXFP4, codes and scales, for [`WeightFiles::write_stacked_mxfp4`].
    pub fn stacked_mxfp4(&self) -> Vec<(String, Vec<usize>, Numbers<'static>)> {
        let stored = self.stacked.iter().filter(|(name, _)| self.is_stacked_mxfp4(name));
        stored.map(|(name, entry)| (name.clone(), entry.shape.clone(), Numbers::Elsewhere(entry.len(), "U8"))).collect()
    }

    /// Whether it is one of [`WeightFiles::stacked_mxfp4`].
    pub fn is_stacked_mxfp4(&self, name: &str) -> bool {
        self.stacked.contains_key(name) && (name.ends_with("_blocks") || name.ends_with("_scales"))
    }

    /// Writes the bytes of one of [`WeightFiles::stacked_mxfp4`], 1 MiB at a time.
    ///
    /// # Errors
    /// The file cannot be read, or the writer fails.
    pub fn write_stacked_mxfp4(&self, name: &str, writer: &mut dyn Write) -> io::Result<()> {
        let entry = self.stacked.get(name).ok_or(io::ErrorKind::NotFound)?;
        let mut written = Ok(());
        self.chunks(entry, |bytes| {
            if written.is_ok() {
                written = writer.write_all(bytes);
            }
        })?;
        written
    }

    /// Whether a tensor is an expert's part of a quantized matrix that the files hold as a whole under another name.
    pub(super) fn is_part(&self, name: &str) -> bool {
        matches!(self.quantized.get(name), Some(QuantizedTensor::Mx(_) | QuantizedTensor::Rows(_)))
    }

    /// A matrix in MXFP4 as it is stored.
    pub(super) fn read_mxfp4(&self, tensor: &MxTensor) -> io::Result<Result<Quantized, String>> {
        let rows = |entry: &Entry, width: usize| {
            let mut all = Vec::with_capacity((entry.end - entry.begin) as usize);
            self.chunks(entry, |bytes| all.extend_from_slice(bytes))?;
            let own = all.chunks_exact(width).skip(tensor.first).step_by(tensor.step);
            Ok::<_, io::Error>(own.flatten().copied().collect::<Vec<u8>>())
        };
        let [_, columns] = tensor.shape;
        let (codes, scales) = (rows(&tensor.codes, columns / 2)?, rows(&tensor.scales, columns / MX_BLOCK)?);
        Ok(Four::mxfp4(codes, scales).map(Quantized::Four))
    }
}

/// Which stacked, not transposed tensors of experts the files hold, so that a model is written in the form in which it
/// was read, or as Transformers reads it.
#[derive(Debug, Clone, Default)]
pub struct Stacking(BTreeSet<String>);

impl Stacking {
    /// No stacked tensors: each matrix is stored by itself.
    pub const NONE: &Self = &Self(BTreeSet::new());

    /// For a model without files: the experts of a family that Transformers reads only stacked.
    pub fn drawn(arch: &Arch) -> Self {
        if !arch.experts.as_ref().is_some_and(Experts::are_only_stacked) {
            return Self::default();
        }
        let tensors = arch.tensors();
        let shapes = tensors.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice()));
        Self(StackedTensor::in_rows(shapes).into_iter().map(|stacked| stacked.name).collect())
    }

    /// The stacked tensors that take the place of some of `tensors` (names and shapes) when the model is written.
    pub fn again<'a>(&self, tensors: impl Iterator<Item = (&'a str, &'a [usize])> + Clone) -> Vec<StackedTensor> {
        let in_rows = StackedTensor::in_rows(tensors.clone()).into_iter().filter(|it| self.0.contains(&it.name));
        let transposed = StackedTensor::transposed(tensors.clone());
        StackedTensor::of(tensors).into_iter().chain(in_rows).chain(transposed).collect()
    }
}

/// A stacked tensor that is to be written.
#[derive(Debug, Clone)]
pub struct StackedTensor {
    /// Its name in files of Transformers.
    pub name: String,
    /// Its shape in the files; the first size is the number of experts.
    pub shape: Vec<usize>,
    /// For each expert, the engine's names of its parts.
    pub experts: Vec<Vec<String>>,
    /// Whether the parts lie one after the other, not transposed; otherwise they are transposed and alternate.
    in_rows: bool,
}

impl StackedTensor {
    /// The stacked tensors that gpt-oss's files have in the place of some of `tensors`, which are names and shapes.
    pub fn of<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Vec<Self> {
        let shapes: BTreeMap<&str, &[usize]> = tensors.collect();
        let blocks = shapes.keys().filter_map(|name| name.strip_suffix(".mlp.router.weight"));
        let tensor = |(block, (end, parts)): (&str, &Stacked)| {
            let names = |expert: usize| -> Vec<String> {
                parts.iter().map(|(part, ..)| format!("{block}.mlp.experts.{expert}.{part}")).collect()
            };
            let experts: Vec<Vec<String>> = (0..MAX_EXPERTS)
                .map(names)
                .take_while(|names| names.iter().all(|name| shapes.contains_key(name.as_str())))
                .collect();
            let first = shapes.get(experts.first()?.first()?.as_str())?;
            let shape = match **first {
                [rows, columns] => vec![experts.len(), columns, parts.len() * rows],
                [width] => vec![experts.len(), parts.len() * width],
                _ => return None,
            };
            Some(Self { name: format!("{block}.mlp.experts.{end}"), shape, experts, in_rows: false })
        };
        blocks.flat_map(|block| STACKED.iter().map(move |stacked| (block, stacked))).filter_map(tensor).collect()
    }

    /// As [`StackedTensor::of`], in the form in which Transformers stacks the experts of all other families.
    pub fn in_rows<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Vec<Self> {
        let shapes: BTreeMap<&str, &[usize]> = tensors.collect();
        let is_gpt_oss = |experts: &str| are_gpt_oss(experts, |router| shapes.contains_key(router));
        let firsts = shapes.keys().filter(|name| name.contains(".experts.0."));
        let names: BTreeSet<String> = firsts.filter_map(|name| stacked_of(name)).collect();
        let stacked = |name: String| {
            let (experts, parts) = of_rows(&name).filter(|(experts, _)| !is_gpt_oss(experts))?;
            let names = |expert: usize| -> Vec<String> {
                parts.iter().map(|part| format!("{experts}.{expert}.{part}")).collect()
            };
            let is_there = |names: &Vec<String>| names.iter().all(|name| shapes.contains_key(name.as_str()));
            let of_each: Vec<Vec<String>> = (0..MAX_EXPERTS).map(names).take_while(is_there).collect();
            let &[rows, columns] = shapes.get(of_each.first()?.first()?.as_str()).copied()? else { return None };
            let shape = vec![of_each.len(), parts.len() * rows, columns];
            Some(Self { name, shape, experts: of_each, in_rows: true })
        };
        names.into_iter().filter_map(stacked).collect()
    }

    /// The matrices that GPT-2's files hold transposed, each by itself.
    fn transposed<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Vec<Self> {
        let of = |(name, shape): (&str, &[usize])| match shape {
            &[outputs, inputs] if is_transposed(name) => {
                let (name, experts) = (name.to_owned(), vec![vec![name.to_owned()]]);
                Some(Self { name, shape: vec![inputs, outputs], experts, in_rows: false })
            }
            _ => None,
        };
        tensors.filter_map(of).collect()
    }

    /// Whether it is one matrix that files hold transposed.
    pub fn is_transposed(&self) -> bool {
        is_transposed(&self.name)
    }

    /// One expert's values in the order in which the stacked tensor stores them, given the values of its parts.
    pub fn joined(&self, parts: &[Vec<f32>]) -> Vec<f32> {
        if self.in_rows {
            return parts.concat();
        }
        let width = self.shape.last().copied().unwrap_or(1);
        let mut out = vec![0.0; parts.iter().map(Vec::len).sum()];
        // Each part is `[width / parts, columns]`, or a bias of one column.
        let columns = out.len() / width.max(1);
        for (first, part) in parts.iter().enumerate() {
            for (row, values) in part.chunks_exact(columns).enumerate() {
                for (column, value) in values.iter().enumerate() {
                    out[column * width + row * parts.len() + first] = *value;
                }
            }
        }
        out
    }
}
