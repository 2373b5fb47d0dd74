//! Several products as one parallel job: one fork and join, tasks of all of them handed out together. Each product has the
//! sums that it has alone.
use super::product::{Job as Tiles, Order};
use super::{matmul, pairs, skinny};
use crate::activation::Activation;
use crate::gemm::interleaved::Interleaved;
use crate::gemm::{Init, Matrix, Product, Store, Term};
use crate::par;
use crate::upcoming::Upcoming;
use smallvec::SmallVec;

enum Job<'a> {
    /// With few tokens.
    Skinny(skinny::Job<'a>),
    Tiles(Tiles<'a>),
}

/// What the product after this one will probably read, of a model for inference.
fn upcoming<'a>(terms: impl Iterator<Item = &'a Term<'a>> + Clone) -> Option<Upcoming> {
    let matrices = terms.filter_map(|term| match term.matrix.data {
        Store::Interleaved(matrix) => Some(matrix),
        _ => None,
    });
    let first = matrices.clone().next()?;
    Some(first.follower().begin(Upcoming::new(matrices.map(Interleaved::stretch))))
}

/// Its operands have passed the checks of `gemm::matmul_grouped`.
pub(in crate::gemm) fn matmul_grouped(products: &mut [Product<'_>]) {
    let upcoming = upcoming(products.iter().flat_map(|product| product.terms));
    let (mut tasks, mut copies) = (0, skinny::Copies::default());
    // Each with the number of tasks up to its end.
    let jobs: SmallVec<[(Job<'_>, usize); 4]> = products
        .iter_mut()
        .map(|Product { out, init, terms }| {
            let (job, own) = if skinny::fits(out.pool().in_pairs(), terms) {
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
    run(&jobs, upcoming);
}

/// Runs all tasks of jobs, each of which has the number of tasks up to its end.
fn run(jobs: &[(Job<'_>, usize)], upcoming: Option<Upcoming>) {
    let tasks = jobs.last().map_or(0, |&(_, tasks)| tasks);
    par::run_ahead(tasks, upcoming, |task| {
        let at = jobs.partition_point(|&(_, end)| end <= task);
        let begin = at.checked_sub(1).map_or(0, |before| jobs[before].1);
        // SAFETY: `task - begin` is one of the tasks of job `at`, since `begin <= task < jobs[at].1`; `run` gives each
        // task to one thread. The operands have been checked, and the caller borrows them until all tasks are done,
        // each result for writing and none twice.
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

/// Whether [`matmul_transposed`] has this product.
pub(in crate::gemm) fn has_transposed(in_pairs: bool, term: &Term<'_>) -> bool {
    skinny::fits(in_pairs, std::slice::from_ref(term))
}

/// Products, of each of which [`has_transposed`] is true, into `[rows, tokens]`. Operands have passed the checks of
/// `gemm::matmul_transposed`.
pub(in crate::gemm) fn matmul_transposed(outs: &mut [Activation], products: &[(usize, Init<'_>, Term<'_>)]) {
    let upcoming = upcoming(products.iter().map(|(.., term)| term));
    let (mut tasks, mut copies) = (0, skinny::Copies::default());
    let jobs = outs.iter_mut().zip(products).map(|(out, &(_, init, term))| {
        let job = skinny::Job::transposed(out, init, term, &mut copies);
        tasks += job.tasks();
        (Job::Skinny(job), tasks)
    });
    run(&jobs.collect::<SmallVec<[_; 4]>>(), upcoming);
}

/// As `gemm::matmul_of_transposed`, whose checks its operands have passed.
pub(in crate::gemm) fn matmul_of_transposed(out: &mut Activation, init: Init<'_>, matrix: Matrix<'_>, x: &Activation) {
    let upcoming = upcoming(std::iter::once(&Term { matrix, x }));
    let job = skinny::Job::of_transposed(out, init, matrix, x);
    let tasks = job.tasks();
    run(&[(Job::Skinny(job), tasks)], upcoming);
}
