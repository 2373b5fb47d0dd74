//! Measures what this machine can do with all threads of the pool: multiply-adds per second with all operands in
//! registers, and bytes per second from memory. Benchmarks compare ops with these peaks.
use super::par;
use super::simd::amx::{SPLIT, TilePart, TileSums, Tiles};
use super::simd::{self, Level, PairLanes, Simd, dispatch, dispatch_pairs};
use std::time::Instant;

/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn spin_kernel<S: Simd>(rounds: usize, seed: &[f32; 16]) -> f32 {
    // SAFETY: the caller has the features of `S`; `seed` and `lanes` hold 16 floats each.
    unsafe {
        let (factor, addend) = (S::splat(0.999), S::load(seed.as_ptr()));
        // Independent sums: enough to hide the latency of a multiply-add, few enough to stay in registers.
        let mut sums = [addend; 12];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = S::mul(addend, S::splat(1.0 + index as f32));
        }
        for _ in 0..rounds {
            for sum in &mut sums[..S::ROWS] {
                *sum = S::fma(*sum, factor, addend);
            }
        }
        let mut total = S::splat(0.0);
        for sum in sums {
            total = S::add(total, sum);
        }
        let mut lanes = [0.0f32; 16];
        S::store(lanes.as_mut_ptr(), total);
        // Every lane is used, so that the compiler cannot leave out half of the work.
        lanes.iter().sum()
    }
}

dispatch! { fn spin = spin_kernel(rounds: usize, seed: &[f32; 16]) -> f32; }

/// Floating-point operations per second (a multiply-add counts as two) of all threads together, measured for about
/// `seconds` at the current SIMD level.
pub fn flops(seconds: f64) -> f64 {
    let (threads, rounds) = (par::threads(), 400_000);
    let chains = match simd::level() {
        Level::Avx512 | Level::Amx => 12,
        Level::Avx2 | Level::Neon => 6,
        Level::Portable => 4,
    };
    let (mut best, start) = (0.0f64, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        let one = Instant::now();
        par::run(threads, |task| {
            // All sixteen lanes differ, because equal halves would be computed only once.
            let mut seed = [0.0f32; 16];
            seed.iter_mut().enumerate().for_each(|(lane, value)| *value = (task * 16 + lane) as f32 * 1e-3);
            let seed = std::hint::black_box(seed);
            // SAFETY: the kernel asks nothing of its arguments.
            std::hint::black_box(unsafe { spin(rounds, &seed) });
        });
        best = best.max((threads * rounds * chains * 32) as f64 / one.elapsed().as_secs_f64());
    }
    best
}

/// # Safety
/// The CPU has the features of `P`.
#[inline(always)]
unsafe fn spin_pairs_kernel<P: PairLanes>(rounds: usize, seed: &[f32; 16], to: &mut [f32; 16]) {
    // SAFETY: the caller has the features of `P`; `seed` and `to` hold 16 floats each.
    unsafe {
        let addend = P::read(seed.as_ptr());
        let factor = P::pair(addend, addend);
        // As many independent sums as the largest tile of the products has.
        let mut sums = [addend; 24];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = P::Wide::mul(addend, P::broadcast(1.0 + index as f32));
        }
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = P::add_product(factor, factor, *sum);
            }
        }
        let mut total = P::broadcast(0.0);
        for sum in sums {
            total = P::Wide::add(total, sum);
        }
        P::write(to.as_mut_ptr(), total);
    }
}

dispatch_pairs! { fn spin_pairs = spin_pairs_kernel(rounds: usize, seed: &[f32; 16], to: &mut [f32; 16]); }

/// One task of [`tile_flops`]: `rounds` products of four tiles each, with operands in the first cache.
fn spin_tiles(rounds: usize) -> f32 {
    const STEPS: usize = 8;
    // Two tiles of rows and two of columns, `STEPS` times 1 KiB each.
    let (rows, columns) = (vec![0.0f32; 2 * STEPS * 256], vec![0.0f32; 2 * STEPS * 256]);
    let mut sums = vec![0.0f32; 4 * 256];
    let part = TilePart {
        rows: rows.as_ptr().cast(),
        apart: STEPS * 64,
        columns: [columns.as_ptr(), columns[STEPS * 256..].as_ptr()].map(<*const f32>::cast),
        steps: STEPS,
    };
    let to = TileSums::places(sums.as_mut_ptr(), 2 * 256, 256);
    let sums_of = TileSums { from: [std::ptr::null(); 4], to, apart: 64 };
    let parts = [part; 16];
    // SAFETY: `in_tiles` has found the tiles; the buffers hold as many numbers as the parts say, and four tiles of sums.
    unsafe {
        let tiles = Tiles::begin();
        for _ in 0..rounds / (parts.len() * STEPS) {
            tiles.add_products(&sums_of, &parts, [2, 2]);
        }
    }
    sums.iter().sum()
}

/// As [`flops`], for bfloat16 products in AMX tiles.
fn tile_flops(seconds: f64) -> f64 {
    let (threads, rounds) = (par::threads(), 128 << 10);
    let (mut best, start) = (0.0f64, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        let one = Instant::now();
        par::run(threads, |_| {
            std::hint::black_box(spin_tiles(rounds));
        });
        // Four products of 16 x 32 and 32 x 16 numbers, two operations each.
        best = best.max((threads * rounds * 4 * 16 * 16 * 32 * 2) as f64 / one.elapsed().as_secs_f64());
    }
    best
}

/// As [`flops`], for products whose operands are bfloat16. Where the processor has no instruction for them, they are as
/// fast as those of float32.
pub fn product_flops(seconds: f64) -> f64 {
    if simd::in_tiles() {
        return tile_flops(seconds);
    }
    if simd::pair_level().is_none() {
        return flops(seconds);
    }
    let (threads, rounds) = (par::threads(), 200_000);
    let (mut best, start) = (0.0f64, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        let one = Instant::now();
        par::run(threads, |task| {
            let seed = std::hint::black_box([(task + 1) as f32 * 1e-3; 16]);
            let mut lanes = [0.0f32; 16];
            // SAFETY: the kernel asks nothing of its arguments.
            unsafe { spin_pairs(rounds, &seed, &mut lanes) };
            std::hint::black_box(lanes);
        });
        // 24 sums of 16 lanes, two multiply-adds each.
        best = best.max((threads * rounds * 24 * 64) as f64 / one.elapsed().as_secs_f64());
    }
    best
}

/// As [`flops`], for products of float32 numbers with bfloat16 ones. In AMX tiles, each of them takes three products.
pub fn mixed_flops(seconds: f64) -> f64 {
    if simd::in_tiles() { tile_flops(seconds) / SPLIT as f64 } else { flops(seconds) }
}

/// # Safety
/// The CPU has the features of `S`; `from` holds `floats` floats, a multiple of 128.
#[inline(always)]
unsafe fn read_kernel<S: Simd>(from: *const f32, floats: usize) -> f32 {
    // SAFETY: each turn reads 128 floats from `at` on, and `at` is a multiple of 128 below `floats`. What is fetched
    // ahead may lie anywhere. `lanes` holds 16 floats.
    unsafe {
        let mut sums = [S::splat(0.0); 8];
        let mut at = 0;
        while at < floats {
            for (index, sum) in sums.iter_mut().enumerate() {
                let place = from.add(at + index * 16);
                simd::prefetch(place.wrapping_add(1024));
                *sum = S::add(*sum, S::load(place));
            }
            at += 128;
        }
        let mut total = S::splat(0.0);
        for sum in sums {
            total = S::add(total, sum);
        }
        let mut lanes = [0.0f32; 16];
        S::store(lanes.as_mut_ptr(), total);
        lanes.iter().sum()
    }
}

dispatch! { fn read = read_kernel(from: *const f32, floats: usize) -> f32; }

/// The bytes per second that all threads together read from memory: the best measurement within about `seconds`, from a
/// buffer that no cache holds.
pub fn read_bandwidth(seconds: f64) -> f64 {
    const FLOATS: usize = 64 << 20;
    const PART: usize = 64 << 10;
    let buffer = vec![1.0f32; FLOATS];
    let (mut best, start) = (0.0f64, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        let one = Instant::now();
        par::run(FLOATS / PART, |task| {
            // SAFETY: `task` is below FLOATS / PART, so that its PART floats lie within the buffer; PART is a multiple
            // of 128.
            std::hint::black_box(unsafe { read(buffer.as_ptr().add(task * PART), PART) });
        });
        best = best.max((FLOATS * size_of::<f32>()) as f64 / one.elapsed().as_secs_f64());
    }
    best
}

/// The bytes per second that all threads together copy from memory to memory, counted once (as much is read as
/// written): the best measurement within about `seconds`, on 64 MiB for each thread, which no cache holds.
pub fn copy_rate(seconds: f64) -> f64 {
    const FLOATS: usize = 16 << 20;
    let threads = par::threads();
    let from: Vec<Vec<f32>> = (0..threads).map(|_| vec![1.0; FLOATS]).collect();
    let mut to: Vec<Vec<f32>> = (0..threads).map(|_| vec![0.0; FLOATS]).collect();
    let parts: Vec<par::Shared<f32>> = to.iter_mut().map(|part| par::Shared(part.as_mut_ptr())).collect();
    let (mut best, start) = (0.0f64, Instant::now());
    while start.elapsed().as_secs_f64() < seconds {
        let one = Instant::now();
        par::run(threads, |task| {
            // SAFETY: both buffers of the task hold FLOATS floats and live until all tasks are done. They do not
            // overlap, and no other task has them.
            unsafe { std::ptr::copy_nonoverlapping(from[task].as_ptr(), parts[task].get(), FLOATS) };
        });
        std::hint::black_box(&to);
        best = best.max((threads * FLOATS * size_of::<f32>()) as f64 / one.elapsed().as_secs_f64());
    }
    best
}
