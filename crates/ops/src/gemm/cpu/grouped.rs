//! Several products as one parallel job: one fork and join, tasks of all of them handed out together. Each product has the
//! sums that it has alone.
use super::product::{Job as Tiles, Order};
use super::tokens::Copies;
use super::{matmul, pairs, skinny, skinny_pairs};
use crate::activation::Activation;
use crate::gemm::interleaved::Interleaved;
use crate::gemm::{Init, Matrix, Product, Term};
use crate::par;
use crate::upcoming::Upcoming;
use smallvec::SmallVec;

enum Job<'a> {
    /// With few tokens.
    Skinny(skinny::Job<'a>),
    Tiles(Tiles<'a>),
}

/// What the product after this one will probably read, of a model for inference.
fn upcoming<'a>(matrices: impl Iterator<Item = &'a Matrix<'a>> + Clone) -> Option<Upcoming> {
    let matrices = matrices.filter_map(Matrix::interleaved);
    let first = matrices.clone().next()?;
    Some(first.follower().begin(Upcoming::new(matrices.map(Interleaved::stretch))))
}

/// Its operands have passed the checks of `gemm::matmul_grouped`.
pub(in crate::gemm) fn matmul_grouped(products: &mut [Product<'_>]) {
    let mixed =
        |product: &Product<'_>| product.terms.len() > 1 && product.terms.iter().any(|term| term.matrix.lies_in_pairs());
    if !products.iter().any(mixed) {
        return matmul_at_once(products);
    }
    // A matrix that lies in pairs is multiplied as such, and others as the pool says: one term after the other.
    let most = products.iter().map(|product| product.terms.len()).max().unwrap_or(0);
    for index in 0..most {
        let of_term = products.iter_mut().filter_map(|Product { out, init, terms }| {
            let init = if index == 0 { *init } else { Init::Out };
            Some(Product { out, init, terms: std::slice::from_ref(terms.get(index)?) })
        });
        matmul_at_once(&mut of_term.collect::<SmallVec<[_; 4]>>());
    }
}

/// As [`matmul_grouped`], in one parallel job.
fn matmul_at_once(products: &mut [Product<'_>]) {
    let upcoming = upcoming(products.iter().flat_map(|product| product.terms).map(|term| &term.matrix));
    let (mut tasks, mut copies) = (0, Copies::default());
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
                Job::Skinny(job) => match job.words() {
                    Some(words) => skinny_pairs::task_at(job, words, job.rows(task - begin)),
                    None => skinny::task_at(job, job.rows(task - begin)),
                },
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

/// A product that [`has_transposed`], into `out [rows, tokens]`. Its operands have passed the checks of `gemm::matmul_transposed`.
pub(in crate::gemm) fn matmul_transposed(out: &mut Activation, term: Term<'_>) {
    let upcoming = upcoming(std::iter::once(&term.matrix));
    run_one(skinny::Job::transposed(out, term), upcoming);
}

/// `gemm::matvec_grouped` into `outs`, whose checks its operands have passed.
pub(in crate::gemm) fn matvec_grouped(
    outs: &mut [Activation],
    products: &[(usize, Init<'_>, Matrix<'_>)],
    x: &Activation,
) {
    let upcoming = upcoming(products.iter().map(|(.., matrix)| matrix));
    let (mut tasks, mut copies) = (0, Copies::default());
    let jobs = outs.iter_mut().zip(products).map(|(out, &(_, init, matrix))| {
        let job = skinny::Job::vector(out, init, matrix, x, &mut copies);
        tasks += job.tasks();
        (Job::Skinny(job), tasks)
    });
    run(&jobs.collect::<SmallVec<[_; 4]>>(), upcoming);
}

/// `gemm::matvec`, whose checks its operands have passed.
pub(in crate::gemm) fn matvec(out: &mut Activation, init: Init<'_>, matrix: Matrix<'_>, x: &Activation) {
    let upcoming = upcoming(std::iter::once(&matrix));
    run_one(skinny::Job::of_vector(out, init, matrix, x), upcoming);
}

fn run_one(job: skinny::Job<'_>, upcoming: Option<Upcoming>) {
    let tasks = job.tasks();
    run(&[(Job::Skinny(job), tasks)], upcoming);
}
