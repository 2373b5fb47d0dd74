//! Finds the matrices that the maker of a checkpoint has quantized (FP8, GPTQ, AWQ, compressed-tensors, NVFP4), by the
//! names of their parts. Each gets the name `MODULE.weight`.
//!
//! ```text
//! FP8                 MODULE.weight F8_E4M3, and .weight_scale_inv, .weight_scale, .scale or .qscale_weight: F32, BF16, or exponents in
//!                     U8 or F8_E8M0; a grid of blocks, a row, or one number
//! GPTQ                MODULE.qweight I32 [in * bits / 32, out], qzeros I32 [groups, out * bits / 32], scales [groups, out], g_idx [in]
//! AWQ                 MODULE.qweight I32 [in, out / 8], qzeros I32 [groups, out / 8], scales [groups, out]
//! compressed-tensors  MODULE.weight_packed I32 [out, in * bits / 32], or weight I8; weight_scale [out, groups], weight_zero_point,
//!                     weight_g_idx, weight_shape
//! NVFP4               MODULE.weight_packed U8 [out, in / 2], weight_global_scale (compressed-tensors); weight U8, weight_scale_2
//!                     (ModelOpt); weight_scale F8_E4M3 [out, in / 16]
//! ```
//!
//! Scales of activations are skipped, because activations are not quantized here.
use super::WeightFiles;
use super::format::Entry;
use super::makers_tensor::{Kind, MakersTensor};
use super::quantized::QuantizedTensor;
use super::write::Numbers;
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::stored_format::{Grouped, Layout, Method, StoredFormat};
use tunesmith_ops::quant::{Quantized, Tiled};

/// The ends of the names of tensors that belong to quantized activations.
const OF_ACTIVATIONS: [&str; 11] = [
    ".activation_scale",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".qscale_act",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_output_scale",
];
/// The names that scales of an FP8 matrix may have.
pub(super) const FP8_SCALES: [&str; 4] = ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"];

/// A matrix that was quantized again; and the bytes of its codes and of its scales, each with the name of its tensor.
pub type Recoded = (Quantized, [(String, Vec<u8>); 2]);

/// A tensor of a matrix in a maker's format, as the files have it.
#[derive(Debug, Clone)]
pub struct MakersPart {
    /// Its name in the files of the language model.
    pub name: String,
    /// Its shape in the files.
    pub shape: Vec<usize>,
    /// The number and dtype of its values, whose bytes [`WeightFiles::write_makers_part`] writes.
    pub numbers: Numbers<'static>,
    key: String,
}

impl WeightFiles {
    /// Finds the matrices in the format that `config.json` describes.
    pub(super) fn find_makers(&mut self, format: &StoredFormat) -> Result<()> {
        let names: Vec<String> = self.entries.keys().cloned().collect();
        let mut found = Vec::new();
        for name in &names {
            if OF_ACTIVATIONS.iter().any(|end| name.ends_with(end)) {
                self.of_activations.insert(name.clone());
                continue;
            }
            let Some((module, end)) = name.rsplit_once('.') else { continue };
            if let Some(tensor) = self.makers(name, module, end, format)? {
                found.push((name.clone(), tensor));
            }
        }
        for (name, tensor) in found {
            let matrix = format!("{}.weight", tensor.module);
            if let Some(entry) = self.entries.remove(&name)
                && let Some(twice) = self.entries.insert(matrix.clone(), entry)
            {
                return Err(self.fail(&twice, &matrix, format!("is there beside {name:?}, which is the same matrix")));
            }
            self.quantized.insert(matrix, QuantizedTensor::Makers(tensor));
        }
        Ok(())
    }

    /// The quantized matrix whose codes the tensor `name` holds; `None` if it holds none.
    fn makers(&self, name: &str, module: &str, end: &str, format: &StoredFormat) -> Result<Option<MakersTensor>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let beside = |end: &str| self.entries.get(&format!("{module}.{end}"));
        let (codes, kind, known): (&'static str, Kind, &[&'static str]) = match (end, entry.dtype.as_str()) {
            ("weight", "F8_E4M3") => {
                let scales = FP8_SCALES.into_iter().find(|end| beside(end).is_some()).ok_or_else(|| {
                    self.fail(entry, name, "is F8_E4M3, and there is no weight_scale_inv or weight_scale beside it")
                })?;
                ("weight", Kind::Fp8(scales), &[])
            }
            ("weight", "U8") if beside("weight_scale_2").is_some() => {
                ("weight", Kind::Nvfp4(false), &["weight_scale", "weight_scale_2"])
            }
            ("weight", "I8") if beside("weight_scale").is_some() => {
                ("weight", Kind::Bytes, &["weight_scale", "weight_zero_point"])
            }
            ("weight_packed", "U8") => {
                ("weight_packed", Kind::Nvfp4(true), &["weight_scale", "weight_global_scale", "weight_shape"])
            }
            ("weight_packed", "I32") => {
                ("weight_packed", Kind::Packed, &["weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"])
            }
            ("qweight", "I32") => match &format.method {
                Method::Gptq(grouped) => ("qweight", Kind::Gptq(*grouped), &["qzeros", "scales", "g_idx"]),
                Method::Awq(_) => ("qweight", Kind::Awq, &["qzeros", "scales"]),
                other => {
                    let message = format!("is packed as GPTQ and AWQ do, and quant_method is {:?}", other.name());
                    return Err(self.fail(entry, name, message));
                }
            },
            _ => return Ok(None),
        };
        let mut names: Vec<&'static str> = known.iter().copied().filter(|end| beside(end).is_some()).collect();
        if let Kind::Fp8(scales) = kind {
            names.push(scales);
        }
        let tensor = MakersTensor {
            shape: [0; 2],
            layout: Layout::Nvfp4,
            kind,
            module: module.to_owned(),
            codes,
            beside: names,
        };
        self.measured(name, entry, tensor, format).map(Some)
    }

    /// Completes shape and layout of a matrix from the shapes of its parts.
    fn measured(
        &self,
        name: &str,
        entry: &Entry,
        mut tensor: MakersTensor,
        format: &StoredFormat,
    ) -> Result<MakersTensor> {
        let misfit =
            |what: String| self.fail(entry, name, what).hint("config.json and the weights must belong to one model");
        let (first, second) = match *entry.shape {
            [first, second] if first > 0 && second > 0 => (first, second),
            _ => return Err(misfit(format!("is {:?}, expected a matrix", entry.shape))),
        };
        let described = format.described(&format!("{}.weight", tensor.module));
        if let Some(layout) = described.first().filter(|_| !described.iter().any(|layout| tensor.kind.has(*layout))) {
            return Err(misfit(format!("is {}, and config.json says {}", entry.dtype, layout.name())));
        }
        let part = |end: &str| {
            let name = format!("{}.{end}", tensor.module);
            let found = self.entries.get(&name).map(|entry| entry.shape.clone());
            found.ok_or_else(|| misfit(format!("has no {name:?} beside it")))
        };
        let named = |end: &str| tensor.beside.contains(&end);
        let matrix = |shape: Vec<usize>, end: &str| match *shape {
            [rows, columns] => Ok([rows, columns]),
            _ => Err(misfit(format!("has {end} {shape:?} beside it, expected two sizes"))),
        };
        let group_of = |columns: usize, groups: usize, claimed: Option<usize>| {
            let claimed = claimed.unwrap_or(columns).min(columns).max(1);
            if columns.div_ceil(claimed) == groups {
                return Ok(claimed);
            }
            if groups > 0 && columns.is_multiple_of(groups) {
                return Ok(columns / groups);
            }
            Err(misfit(format!("has {groups} groups for {columns} columns, expected groups of {claimed}")))
        };
        (tensor.shape, tensor.layout) = match tensor.kind {
            Kind::Fp8(scales) => {
                let block = match format.layout(name) {
                    Some(Layout::Fp8 { tile }) if tile != [usize::MAX; 2] => Some(tile),
                    _ => None,
                };
                let grid = part(scales)?;
                let tile = fp8_tile([first, second], scales, &grid, block).ok_or_else(|| {
                    let expected = block.map_or_else(
                        || "one, or one a row, as weight_block_size says no block".to_owned(),
                        |tile| {
                            format!("{} x {} for blocks of {tile:?}", first.div_ceil(tile[0]), second.div_ceil(tile[1]))
                        },
                    );
                    misfit(format!("({first} x {second}) has scales {grid:?} beside it, expected {expected}"))
                })?;
                ([first, second], Layout::Fp8 { tile })
            }
            Kind::Nvfp4(divides) => {
                let [rows, groups] = matrix(part("weight_scale")?, "weight_scale")?;
                part(if divides { "weight_global_scale" } else { "weight_scale_2" })?;
                if rows != first || groups.checked_mul(8) != Some(second) {
                    return Err(misfit(format!(
                        "is {:?} with scales [{rows}, {groups}], expected one for 16 numbers",
                        entry.shape
                    )));
                }
                ([first, groups * 16], Layout::Nvfp4)
            }
            Kind::Gptq(Grouped { group, symmetric, sorted, .. }) => {
                let [groups, rows] = matrix(part("scales")?, "scales")?;
                let zeros = matrix(part("qzeros")?, "qzeros")?;
                let bits = [4, 8]
                    .into_iter()
                    .find(|bits| zeros == [groups, second * bits / 32] && (second * bits).is_multiple_of(32))
                    .filter(|_| rows == second);
                let Some(bits) = bits else {
                    return Err(misfit(format!(
                        "is {:?}, with scales [{groups}, {rows}] and qzeros {zeros:?}",
                        entry.shape
                    )));
                };
                let columns = first * (32 / bits);
                let group = group_of(columns, groups, group)?;
                let grouped = sorted && groups > 1;
                if grouped && part("g_idx")? != [columns] {
                    let found = part("g_idx")?;
                    return Err(misfit(format!(
                        "has g_idx {found:?} beside it, expected I32 [{columns}], the group of each of the columns (desc_act: true)"
                    )));
                }
                ([rows, columns], Layout::Integers { bits, group, zeros: !symmetric, grouped })
            }
            Kind::Awq => {
                let [groups, rows] = matrix(part("scales")?, "scales")?;
                let Method::Awq(Grouped { group, symmetric, .. }) = format.method else {
                    return Err(misfit("is no AWQ".into()));
                };
                if named("qzeros") && part("qzeros")? != [groups, second] || second * 8 != rows {
                    return Err(misfit(format!("is {:?}, with scales [{groups}, {rows}]", entry.shape)));
                }
                if !symmetric {
                    part("qzeros")?;
                }
                let (group, zeros) = (group_of(first, groups, group)?, !symmetric);
                ([rows, first], Layout::Integers { bits: 4, group, zeros, grouped: false })
            }
            Kind::Packed | Kind::Bytes => {
                let (bits, columns) = match (tensor.kind, named("weight_shape")) {
                    (Kind::Bytes, _) => (8, second),
                    (_, true) => {
                        let [rows, columns] = self.two_sizes(&format!("{}.weight_shape", tensor.module))?;
                        let bits = [4, 8].into_iter().find(|bits| (columns * bits).div_ceil(32) == second);
                        let Some(bits) = bits.filter(|_| rows == first) else {
                            return Err(misfit(format!(
                                "is {:?}, and weight_shape says [{rows}, {columns}]",
                                entry.shape
                            )));
                        };
                        (bits, columns)
                    }
                    (_, false) => return Err(misfit("has no weight_shape beside it".into())),
                };
                let scales = part("weight_scale")?;
                let (claimed, sorted) = match format.layout(&format!("{}.weight", tensor.module)) {
                    Some(Layout::Integers { group, grouped, .. }) => (Some(group), grouped),
                    _ => (None, false),
                };
                let group = match *scales {
                    [rows, groups] if rows == first => group_of(columns, groups, claimed)?,
                    _ if scales.iter().product::<usize>() == 1 => columns,
                    [rows] if rows == first => columns,
                    _ => {
                        return Err(misfit(format!(
                            "has weight_scale {scales:?} beside it, expected one a row, of {first}"
                        )));
                    }
                };
                // The groups of config.json that describe integers: all of them, or none, promise a part.
                let promised = |of: fn(Layout) -> bool| !described.is_empty() && described.iter().all(|it| of(*it));
                let zeros = named("weight_zero_point");
                if !zeros && promised(|it| matches!(it, Layout::Integers { zeros: true, .. })) {
                    return Err(misfit(
                        "has no weight_zero_point beside it, and config.json says symmetric: false".into(),
                    ));
                }
                if promised(|it| matches!(it, Layout::Integers { grouped: true, .. })) {
                    part("weight_g_idx")?;
                }
                let grouped = sorted && named("weight_g_idx");
                if zeros {
                    let found = part("weight_zero_point")?;
                    let words = [(first * bits).div_ceil(32), columns.div_ceil(group)];
                    let fits = if tensor.kind == Kind::Packed { found == words } else { found == scales };
                    if !fits {
                        return Err(misfit(format!("has weight_zero_point {found:?} beside it, which does not fit")));
                    }
                }
                ([first, columns], Layout::Integers { bits, group, zeros, grouped })
            }
        };
        match tensor.layout {
            Layout::Integers { bits: 4, .. } if !tensor.shape[1].is_multiple_of(2) => Err(misfit(format!(
                "has {} columns: an odd number of columns in integers of 4 bits is not read yet",
                tensor.shape[1]
            ))),
            _ => Ok(tensor),
        }
    }

    /// The layout of a matrix in its maker's format; `None` for any other tensor.
    pub fn layout(&self, name: &str) -> Option<Layout> {
        match self.quantized.get(name)? {
            QuantizedTensor::Makers(tensor) => Some(tensor.layout),
            QuantizedTensor::Mx(_) => Some(Layout::Mxfp4),
            _ => None,
        }
    }

    /// The layouts of all matrices that the files hold in their maker's format.
    pub fn layouts(&self) -> Arc<BTreeMap<String, Layout>> {
        let layout = |name: &String| Some((name.clone(), self.layout(name)?));
        Arc::new(self.quantized.keys().filter_map(layout).collect())
    }

    /// Whether the files have scales of quantized activations beside the matrices. Nothing reads them.
    pub fn has_activation_scales(&self) -> bool {
        !self.of_activations.is_empty()
    }

    /// The tensors that the files have for a matrix in a maker's format other than MXFP4: codes, scales, and what else
    /// lies beside them. Empty for any other tensor.
    pub fn makers_parts(&self, name: &str) -> Vec<MakersPart> {
        let Some(QuantizedTensor::Makers(tensor)) = self.quantized.get(name) else { return Vec::new() };
        let activations =
            self.of_activations.iter().filter(|of| of.rsplit_once('.').is_some_and(|(of, _)| of == tensor.module));
        let codes = (format!("{}.{}", tensor.module, tensor.codes), name.to_owned());
        let beside = tensor.companions().chain(activations.cloned()).map(|name| (name.clone(), name));
        let part = |(name, key): (String, String)| {
            let entry = self.entries.get(&key)?;
            let dtype = super::format::known_dtype(&entry.dtype)?;
            let numbers = Numbers::Elsewhere(entry.len(), dtype);
            Some(MakersPart { name, shape: entry.shape.clone(), numbers, key })
        };
        [codes].into_iter().chain(beside).filter_map(part).collect()
    }

    /// The tensors that belong to quantized activations and lie beside no matrix, such as the scales of a KV cache.
    pub fn makers_leftovers(&self) -> Vec<MakersPart> {
        let alone = |of: &&String| {
            let module = of.rsplit_once('.').map_or("", |(module, _)| module);
            !matches!(self.quantized.get(&format!("{module}.weight")), Some(QuantizedTensor::Makers(_)))
        };
        let part = |name: &String| {
            let entry = self.entries.get(name)?;
            let numbers = Numbers::Elsewhere(entry.len(), super::format::known_dtype(&entry.dtype)?);
            Some(MakersPart { name: name.clone(), shape: entry.shape.clone(), numbers, key: name.clone() })
        };
        self.of_activations.iter().filter(alone).filter_map(part).collect()
    }

    /// Quantizes new values of a matrix that the files hold in FP8, in the same layout. Gives the bytes of its codes
    /// and of its scales, by their names in [`WeightFiles::makers_parts`]. Scales are rounded to their dtype first.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the files hold no such matrix, or a number is not finite.
    pub fn recoded_fp8(&self, name: &str, values: &[f32]) -> Result<Recoded> {
        let found = self.quantized.get(name);
        let Some(QuantizedTensor::Makers(MakersTensor {
            layout: Layout::Fp8 { tile },
            kind: Kind::Fp8(end),
            module,
            shape,
            ..
        })) = found
        else {
            return Err(Error::model(format!("tensor {name:?} is not stored in FP8")));
        };
        let scales = format!("{module}.{end}");
        let dtype = self.entry(&scales)?.dtype.as_str();
        let exponent = |scale: f32| scale.log2().ceil().clamp(-127.0, 127.0);
        let round = |scale: f32| match dtype {
            "BF16" => bf16::from_f32(scale).to_f32(),
            "F16" => f16::from_f32(scale).to_f32(),
            "U8" | "F8_E8M0" => exponent(scale).exp2(),
            _ => scale,
        };
        let tiled = Tiled::coded_fp8(values, shape[1], *tile, round)
            .map_err(|error| Error::model(format!("tensor {name:?} has {error}")))?;
        let mut bytes = Vec::with_capacity(4 * tiled.scales().len());
        for &scale in tiled.scales() {
            match dtype {
                "BF16" => bytes.extend(bf16::from_f32(scale).to_le_bytes()),
                "F16" => bytes.extend(f16::from_f32(scale).to_le_bytes()),
                "U8" | "F8_E8M0" => bytes.push((exponent(scale) + 127.0) as u8),
                _ => bytes.extend(scale.to_le_bytes()),
            }
        }
        let codes = tiled.codes().to_vec();
        Ok((Quantized::Tiled(tiled), [(name.to_owned(), codes), (scales, bytes)]))
    }

    /// Writes the bytes of one of [`WeightFiles::makers_parts`], 1 MiB at a time.
    ///
    /// # Errors
    /// The file cannot be read, or the writer fails.
    pub fn write_makers_part(&self, part: &MakersPart, writer: &mut dyn Write) -> io::Result<()> {
        let entry = self.entries.get(&part.key).ok_or(io::ErrorKind::NotFound)?;
        let mut written = Ok(());
        self.chunks(entry, |bytes| {
            if written.is_ok() {
                written = writer.write_all(bytes);
            }
        })?;
        written
    }

    /// Reads a tensor of two integers that are the sizes of a matrix (`weight_shape`).
    fn two_sizes(&self, name: &str) -> Result<[usize; 2]> {
        let entry = self.entries.get(name).ok_or_else(|| Error::model(format!("no tensor {name:?}")))?;
        let width = match (entry.dtype.as_str(), entry.shape.as_slice()) {
            ("I64", [2]) => 8,
            ("I32", [2]) => 4,
            _ => {
                return Err(self.fail(
                    entry,
                    name,
                    format!("is {} {:?}, expected two sizes", entry.dtype, entry.shape),
                ));
            }
        };
        let mut bytes = Vec::with_capacity(16);
        self.chunks(entry, |chunk| bytes.extend_from_slice(chunk)).map_err(|error| self.unread(entry, name, &error))?;
        let mut sizes = bytes.chunks_exact(width).map(|word| {
            let value = word.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
            usize::try_from(value).ok().filter(|&size| size > 0 && size <= 1 << 24)
        });
        match (sizes.next().flatten(), sizes.next().flatten()) {
            (Some(rows), Some(columns)) => Ok([rows, columns]),
            _ => Err(self.fail(entry, name, "holds no two sizes of a matrix")),
        }
    }
}

/// The tile of rows and columns that share a scale, from the name and the shape of the scales: one scale for the matrix, one
/// for each row, or a grid of blocks. `None` if the shape fits none of these, or is by rows where blocks are described.
fn fp8_tile(
    [rows, columns]: [usize; 2],
    name: &str,
    scales: &[usize],
    block: Option<[usize; 2]>,
) -> Option<[usize; 2]> {
    let grid = block.map(|[high, wide]| [rows.div_ceil(high), columns.div_ceil(wide)]);
    if let (Some(grid), Some(block)) = (grid, block)
        && scales == grid
    {
        return Some(block);
    }
    if scales.iter().product::<usize>() == 1 {
        return Some([usize::MAX; 2]);
    }
    let of_blocks = block.is_some_and(|[_, wide]| wide < usize::MAX);
    let by_rows = if of_blocks { name != FP8_SCALES[0] && scales == [rows, 1] } else { is_by_rows(scales, rows) };
    by_rows.then_some([1, usize::MAX])
}

/// Whether scales are one for each row.
fn is_by_rows(scales: &[usize], rows: usize) -> bool {
    scales == [rows] || scales == [rows, 1]
}
