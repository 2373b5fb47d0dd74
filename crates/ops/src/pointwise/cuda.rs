//! Activation functions on a GPU.
use super::Function;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("pointwise", include_str!("pointwise.cu"));

/// The number by which the kernels know a function.
const fn number(function: Function) -> i32 {
    match function {
        Function::Gelu => 0,
        Function::GeluTanh => 1,
        Function::QuickGelu => 2,
        Function::Silu => 3,
        Function::Relu => 4,
        Function::Relu2 => 5,
        Function::Tanh => 6,
    }
}

pub(super) fn forward(function: Function, x: &Activation, out: &mut Activation) {
    let count = x.tokens() * x.features();
    let args = [x.into(), out.into(), number(function).into(), Arg::count(count)];
    cuda::launch(x.device(), KERNELS.same(&[x, out]), "pointwise_forward", Grid::items(count), &args);
}

pub(super) fn backward(function: Function, x: &mut Activation, d_out: &Activation) {
    let count = d_out.tokens() * d_out.features();
    let args = [x.into(), d_out.into(), number(function).into(), Arg::count(count)];
    cuda::launch(d_out.device(), KERNELS.same(&[x, d_out]), "pointwise_backward", Grid::items(count), &args);
}
