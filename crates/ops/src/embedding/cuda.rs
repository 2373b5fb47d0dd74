//! The embedding on a GPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::FloatsMut;
use crate::gemm::Store;

static KERNELS: Typed = Typed::new("embedding", include_str!("embedding.cu"));

/// Panics if a token has no row in a table of `numbers` floats: kernels do not check that.
fn check(tokens: impl Iterator<Item = u32>, numbers: usize, features: usize) {
    let rows = numbers / features;
    for token in tokens {
        assert!((token as usize) < rows, "token {token}, where the table has those below {rows}");
    }
}

pub(super) fn forward(table: Store<'_>, tokens: &[u32], scale: f32, out: &mut Activation) {
    let (device, features) = (out.device(), out.features());
    check(tokens.iter().copied(), table.len(), features);
    let (kernel, table) = match table {
        Store::F32(values) => ("embedding_f32", Arg::from(values)),
        Store::Bf16(values) => ("embedding_bf16", Arg::from(values)),
        Store::Quantized(_) | Store::Interleaved(_) => panic!("an embedding table on a GPU is in floats"),
    };
    let ids = cuda::upload(device, tokens);
    let args = [table, (&ids).into(), out.into(), scale.into(), Arg::count(tokens.len()), Arg::count(features)];
    cuda::launch(device, KERNELS.same(&[out]), kernel, Grid::items(tokens.len() * features), &args);
}

/// One block for each row of the table, which adds the gradients of its tokens in their order.
pub(super) fn backward(dx: &Activation, tokens: &[u32], scale: f32, padding: Option<u32>, d_table: FloatsMut<'_>) {
    let mut places: Vec<u32> = (0..tokens.len() as u32).filter(|&at| Some(tokens[at as usize]) != padding).collect();
    places.sort_by_key(|&at| tokens[at as usize]);
    let (mut ids, mut starts) = (Vec::new(), Vec::new());
    for (index, &at) in places.iter().enumerate() {
        if ids.last() != Some(&tokens[at as usize]) {
            ids.push(tokens[at as usize]);
            starts.push(index as u32);
        }
    }
    starts.push(places.len() as u32);
    let (device, features, rows) = (dx.device(), dx.features(), ids.len());
    assert_eq!(tokens.len(), dx.tokens(), "a token for each gradient");
    check(ids.iter().copied(), d_table.len(), features);
    let [ids, starts, places] = [ids, starts, places].map(|indices| cuda::upload(device, &indices));
    let args = [
        dx.into(),
        (&ids).into(),
        (&starts).into(),
        (&places).into(),
        scale.into(),
        d_table.into(),
        Arg::count(features),
    ];
    cuda::launch(device, KERNELS.same(&[dx]), "embedding_backward", Grid::rows(rows, features), &args);
}
