//! Several products as one parallel job: one fork and join, tasks of all of them handed out together. Each product has the
//! sums that it has alone.
use super::product::{Job as Tiles, Order, RawTerm};
use super::rounding::Roundings;
use super::tokens::Copies;
use super::{amx, matmul, pairs, skinny, skinny_pairs};
use crate::activation::{Activation, LANES, Pool};
use crate::gemm::interleaved::Interleaved;
use crate::gemm::{Init, Matrix, Product, Term};
use crate::par::{self, Shared};
use crate::scratch::with_shared;
use crate::upcoming::Upcoming;
use smallvec::{SmallVec, smallvec};

/// Floats of activations that are rounded once for all tasks, at most: 16 MiB, and as many for each of the parts of split numbers. Beyond
/// that, a product is cut into several of fewer features; or each task rounds its own panels. Tests have less, so that small products are cut as well.
const MOST_ROUNDED: usize = if cfg!(test) { 1 << 18 } else { 4 << 20 };

/// Such a part has a multiple of so many features.
const PART: usize = 256;

/// Rows that multiply an activation, on average, from which it is rounded once for all tasks.
const FEWEST_SHARED_ROWS: usize = 864;

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
    let mut copies = Copies::default();
    let jobs: SmallVec<[Job<'_>; 4]> = products
        .iter_mut()
        .map(|Product { out, init, terms }| {
            if skinny::fits(out.pool(), terms) {
                Job::Skinny(skinny::Job::new(out, *init, terms, &mut copies))
            } else {
                Job::Tiles(Tiles::new(out, *init, terms))
            }
        })
        .collect();
    run_rounded(jobs, upcoming);
}

/// Rounds the activations of products in pairs once for all tasks, where they are not too large, and runs all tasks.
fn run_rounded(mut jobs: SmallVec<[Job<'_>; 4]>, upcoming: Option<Upcoming>) {
    let mut roundings = Roundings::default();
    let (mut places, mut uses, mut tiles, mut most) = (SmallVec::<[usize; 8]>::new(), 0, false, 0);
    each_term(&mut jobs, |term, [rows, panels], order, block| {
        places.push(roundings.add(term, panels, order, block));
        uses += rows * panels * term.whole.depth;
        tiles |= order.in_tiles();
        most = most.max(MOST_ROUNDED * order.parts());
    });
    let floats = roundings.floats();
    // A number is half a float. Few rows are multiplied by the threads that round their panels, from their own caches.
    let few = !tiles && uses < FEWEST_SHARED_ROWS * floats / (LANES / 2);
    if floats > most && !few {
        let [Job::Tiles(job)] = &jobs[..] else { return run(&jobs, upcoming) };
        // A number is half a float for each of its parts, and half of the room is left to what the last part adds.
        let features = MOST_ROUNDED / (job.panels * LANES) / PART * PART;
        let Some(parts) = job.cut_deep(features).filter(|parts| parts.len() > 1) else { return run(&jobs, upcoming) };
        for part in parts {
            run_rounded(smallvec![Job::Tiles(part)], None);
        }
        return;
    }
    if floats == 0 || few {
        return run(&jobs, upcoming);
    }
    for job in &mut jobs {
        if let Job::Tiles(job) = job {
            job.cut_finer();
        }
    }
    with_shared(floats, |rounded| {
        let (to, mut places) = (Shared(rounded.as_mut_ptr()), places.into_iter());
        // SAFETY: there is room for all floats, and the activations stay borrowed.
        unsafe { roundings.run(to) };
        each_term(&mut jobs, |term, _, _, _| {
            if let Some(at) = places.next() {
                term.rounded = to.get().wrapping_add(at);
            }
        });
        run(&jobs, upcoming);
    });
}

/// Calls `f` with each term whose operands are rounded, the rows and panels of its result, how it is multiplied, and the features of its
/// blocks.
fn each_term<'a>(jobs: &mut [Job<'a>], mut f: impl FnMut(&mut RawTerm<'a>, [usize; 2], Order, usize)) {
    for job in jobs {
        let Job::Tiles(job) = job else { continue };
        let (size, order) = ([job.rows, job.panels], job.order);
        for stage in &mut job.stages {
            if !order.rounds(&stage.first) {
                continue;
            }
            let block = stage.first.block(order);
            f(&mut stage.first, size, order, block);
            if let Some(second) = &mut stage.second {
                let whole = second.whole.depth;
                f(second, size, order, whole);
            }
        }
    }
}

/// The product in tiles and the rows of the task after this one, which the same thread most likely runs.
fn following<'a, 'b>(jobs: &[(&'a Job<'b>, usize)], task: usize) -> Option<(&'a Tiles<'b>, [usize; 2])> {
    let at = jobs.partition_point(|&(_, end)| end <= task + 1);
    let begin = at.checked_sub(1).map_or(0, |before| jobs[before].1);
    match jobs.get(at)?.0 {
        Job::Tiles(job) => Some((job, job.part(task + 1 - begin)[0])),
        Job::Skinny(_) => None,
    }
}

/// Runs all tasks of jobs.
fn run(jobs: &[Job<'_>], upcoming: Option<Upcoming>) {
    // Each with the number of tasks up to its end.
    let mut tasks = 0;
    let jobs: SmallVec<[(&Job<'_>, usize); 4]> = jobs
        .iter()
        .map(|job| {
            tasks += match job {
                Job::Skinny(job) => job.tasks(),
                Job::Tiles(job) => job.tasks(),
            };
            (job, tasks)
        })
        .collect();
    par::run_ahead(tasks, upcoming, |task| {
        let at = jobs.partition_point(|&(_, end)| end <= task);
        let begin = at.checked_sub(1).map_or(0, |before| jobs[before].1);
        // SAFETY: `task - begin` is one of the tasks of job `at`, since `begin <= task < jobs[at].1`; `run` gives each
        // task to one thread. The operands have been checked, and the caller borrows them until all tasks are done,
        // each result for writing and none twice.
        unsafe {
            match jobs[at].0 {
                Job::Skinny(job) => match job.words() {
                    Some(words) => skinny_pairs::task_at(job, words, job.rows(task - begin)),
                    None => skinny::task_at(job, job.rows(task - begin)),
                },
                Job::Tiles(job) => {
                    let [rows, panels] = job.part(task - begin);
                    match job.order {
                        Order::InPairs => pairs::block(job, rows, panels),
                        Order::InTiles | Order::Split => amx::block(job, rows, panels, following(&jobs, task)),
                        Order::ByTile | Order::ByPanel => matmul::block(job, 0..job.stages.len(), rows, panels),
                    }
                }
            }
        }
    });
}

/// Whether [`matmul_transposed`] has this product.
pub(in crate::gemm) fn has_transposed(pool: &Pool, term: &Term<'_>) -> bool {
    skinny::fits(pool, std::slice::from_ref(term))
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
    let mut copies = Copies::default();
    let products = outs.iter_mut().zip(products);
    let jobs =
        products.map(|(out, &(_, init, matrix))| Job::Skinny(skinny::Job::vector(out, init, matrix, x, &mut copies)));
    run(&jobs.collect::<SmallVec<[_; 4]>>(), upcoming);
}

/// `gemm::matvec`, whose checks its operands have passed.
pub(in crate::gemm) fn matvec(out: &mut Activation, init: Init<'_>, matrix: Matrix<'_>, x: &Activation) {
    let upcoming = upcoming(std::iter::once(&matrix));
    run_one(skinny::Job::of_vector(out, init, matrix, x), upcoming);
}

fn run_one(job: skinny::Job<'_>, upcoming: Option<Upcoming>) {
    run(&[Job::Skinny(job)], upcoming);
}
