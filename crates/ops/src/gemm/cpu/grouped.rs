//! Several products as one parallel job: one fork and join, tasks of all of them handed out together. Each product has the
//! sums that it has alone.
use super::product::{Job as Tiles, Order};
use super::{matmul, pairs, skinny};
use crate::gemm::interleaved::Interleaved;
use crate::gemm::{Product, Store};
use crate::par;
use crate::upcoming::Upcoming;
use smallvec::SmallVec;

enum Job<'a> {
    /// With few tokens.
    Skinny(skinny::Job<'a>),
    Tiles(Tiles<'a>),
}

/// What the product after this one will probably read, of a model for inference.
fn upcoming(products: &[Product<'_>]) -> Option<Upcoming> {
    let matrices = products.iter().flat_map(|product| product.terms).filter_map(|term| match term.matrix.data {
        Store::Interleaved(matrix) => Some(matrix),
        _ => None,
    });
    let first = matrices.clone().next()?;
    Some(first.follower().begin(Upcoming::new(matrices.map(Interleaved::stretch))))
}

/// Its operands have passed the checks of `gemm::matmul_grouped`.
pub(in crate::gemm) fn matmul_grouped(products: &mut [Product<'_>]) {
    let upcoming = upcoming(products);
    let (mut tasks, mut copies) = (0, skinny::Copies::default());
    // Each with the number of tasks up to its end.
    let jobs: SmallVec<[(Job<'_>, usize); 4]> = products
        .iter_mut()
        .map(|Product { out, init, terms }| {
            let (job, own) = if skinny::fits(out, terms) {
                let job = skinny::Job::new(out, *init, terms, &mut copies);
                let own = job.tasks();
                (Job::Skinny(job), own)
            } else {
                let job = Tiles::new(out, *init, terms);
                let own = job.tasks();
                (Job::Tiles(job), own)
            };
            tasks += own;
            (job, tasks)
        })
        .collect();
    par::run_ahead(tasks, upcoming, |task| {
        let at = jobs.partition_point(|&(_, end)| end <= task);
        let begin = at.checked_sub(1).map_or(0, |before| jobs[before].1);
        // SAFETY: `task - begin` is one of the tasks of job `at`, since `begin <= task < jobs[at].1`; `run` gives each
        // task to one thread. The operands have been checked, and `products` borrows them until all tasks are done,
        // each `out` for writing and no `out` twice.
        unsafe {
            match &jobs[at].0 {
                Job::Skinny(job) => job.run(task - begin),
                Job::Tiles(job) => {
                    let [rows, panels] = job.part(task - begin);
                    match job.order {
                        Order::InPairs => pairs::block(job, rows, panels),
                        Order::ByTile | Order::ByPanel => matmul::block(job, rows, panels),
                    }
                }
            }
        }
    });
}
