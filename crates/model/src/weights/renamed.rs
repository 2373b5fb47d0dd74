//! Tensors that have other names in files than in memory in Transformers.
//!
//! LFM3's gate of each head is `gate_proj` in files. In Transformers' class and in adapters it is `g_proj`, and the
//! engine uses that name.
//!
//! Files of OLMo Hybrid that Transformers has written: their tensors get the names and shapes of the first published
//! files. There, q, k and v have a convolution each, and the norms of blocks with linear attention have their own
//! names.
//!
//! Transformers' class has one convolution, `conv1d`, and one pair of names of norms. In its files, every block has the
//! second pair of names. The convolution is cut into three equal parts, whatever the widths of q, k and v are.
use super::WeightFiles;
use super::format::Entry;

/// The norms of a block, by the names of the class and of the files.
const NORMS: [(&str, &str); 2] =
    [("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")];

impl WeightFiles {
    /// Gives tensors of OLMo Hybrid's blocks the names of its first files. Tensors of another shape stay as they are.
    pub(super) fn rename_linear_attention(&mut self) {
        let blocks = |weights: &Self, end: &str| -> Vec<String> {
            weights.entries.keys().filter_map(|name| name.strip_suffix(end)).map(str::to_owned).collect()
        };
        let hybrid = blocks(self, ".linear_attn.g_proj.weight");
        if hybrid.is_empty() {
            return;
        }
        for block in blocks(self, ".self_attn.q_norm.weight") {
            let [_, (own, stored)] = NORMS;
            self.rename(&format!("{block}.{stored}.weight"), format!("{block}.{own}.weight"));
        }
        for block in hybrid {
            for (own, stored) in NORMS {
                self.rename(&format!("{block}.{own}.weight"), format!("{block}.{stored}.weight"));
            }
            self.cut_convolution(&format!("{block}.linear_attn"));
        }
    }

    /// Gives LFM3's gates the name that they have in its class.
    pub(super) fn rename_head_gates(&mut self) {
        let blocks = self.entries.keys().filter_map(|name| name.strip_suffix(".operator_norm.weight"));
        let prefixes: Vec<String> = blocks.map(|block| format!("{block}.self_attn.gate_proj.")).collect();
        let of_gates = |name: &&String| prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()));
        let names: Vec<String> = self.entries.keys().filter(of_gates).cloned().collect();
        for name in names {
            self.rename(&name, name.replace(".self_attn.gate_proj.", ".self_attn.g_proj."));
        }
    }

    fn rename(&mut self, from: &str, to: String) {
        if !self.entries.contains_key(&to)
            && let Some(entry) = self.entries.remove(from)
        {
            self.entries.insert(to, entry);
        }
    }

    /// Cuts the convolution of a mixer as its projections are cut.
    fn cut_convolution(&mut self, mixer: &str) {
        let names = ["q", "k", "v"].map(|part| format!("{mixer}.{part}_conv1d.weight"));
        let whole = format!("{mixer}.conv1d.weight");
        let stored: Vec<String> = if self.entries.contains_key(&whole) { vec![whole] } else { names.to_vec() };
        if stored.len() == 1 && names.iter().any(|name| self.entries.contains_key(name)) {
            return; // The same convolution twice: the whole one is refused as no part of the model.
        }
        let Some(entries) = stored.iter().map(|name| self.entries.get(name).cloned()).collect::<Option<Vec<_>>>()
        else {
            return;
        };
        let rows = ["q", "k", "v"].map(|part| match self.shape(&format!("{mixer}.{part}_proj.weight")) {
            Some(&[rows, _]) => rows,
            _ => 0,
        });
        let Some(parts) = cut(&entries, rows) else { return };
        for name in stored {
            self.entries.remove(&name);
        }
        for (name, (entry, pieces)) in names.into_iter().zip(parts) {
            if pieces.len() > 1 {
                self.pieces.insert(name.clone(), pieces);
            }
            self.entries.insert(name, entry);
        }
    }
}

/// Cuts `entries`, which are `[rows, 1, kernel]` and lie end to end, into three tensors with these numbers of rows.
/// Each comes as one tensor with its pieces. `None` if the entries do not have exactly so many rows.
fn cut(entries: &[Entry], rows: [usize; 3]) -> Option<Vec<(Entry, Vec<Entry>)>> {
    let mut left: Vec<Entry> = entries.to_vec();
    let mut parts = Vec::new();
    for rows in rows {
        let (mut missing, mut pieces) = (rows, Vec::new());
        while missing > 0 {
            let first = left.first_mut()?;
            let &[stored, 1, kernel] = first.shape.as_slice() else { return None };
            if stored == 0 {
                left.remove(0);
                continue;
            }
            let taken = missing.min(stored);
            let bytes = (first.end - first.begin) / stored as u64 * taken as u64;
            let piece = Entry { end: first.begin + bytes, shape: vec![taken, 1, kernel], ..first.clone() };
            (first.begin, first.shape[0]) = (piece.end, stored - taken);
            pieces.push(piece);
            missing -= taken;
        }
        let one = pieces.first()?.clone();
        let kernel = *one.shape.last()?;
        let alike = pieces.iter().all(|piece| piece.dtype == one.dtype && piece.shape.last() == Some(&kernel));
        if !alike {
            return None;
        }
        parts.push((Entry { shape: vec![rows, 1, kernel], ..one }, pieces));
    }
    left.iter().all(|rest| rest.shape.first() == Some(&0)).then_some(parts)
}
