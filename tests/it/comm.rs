//! Every communication engine against a plain oracle, with many sizes, types and numbers of ranks: results have the same bits
//! on every rank and in every run.
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use proptest::prelude::*;
use tunesmith::comm::env::{Endpoint, Launch};
use tunesmith::comm::gloo::{self, Gloo};
use tunesmith::comm::host::Host;
use tunesmith::comm::membership::Facts;
#[cfg(feature = "cuda")]
use tunesmith::comm::nccl;
#[cfg(feature = "cuda")]
use tunesmith::comm::partitioned_collectives::{PartitionedCollectives, Piece};
use tunesmith::comm::rendezvous::{Rendezvous, Wait};
use tunesmith::comm::single::Single;
use tunesmith::comm::token::RunToken;
use tunesmith::comm::{Collectives, Element, Limits, World, part, threads};
#[cfg(feature = "cuda")]
use tunesmith::device::{Array, Device, FloatBuffer};

/// Builds the Gloo engine where it can be built. Says why not where it cannot; with `TUNESMITH_TEST_GLOO=require`
/// that is a failure.
pub fn gloo_is_there() -> bool {
    static BUILT: OnceLock<Result<(), String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| gloo::provide(&|_| ()).map(drop).map_err(|error| error.to_string()));
    if let Err(why) = built {
        assert!(std::env::var("TUNESMITH_TEST_GLOO").as_deref() != Ok("require"), "{why}");
        eprintln!("SKIPPED, the Gloo engine cannot be built here: {why}");
    }
    built.is_ok()
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Engine {
    Threads,
    Gloo,
    #[cfg(feature = "cuda")]
    Nccl,
}

fn engines() -> Vec<Engine> {
    #[cfg(feature = "cuda")]
    if over_nccl() {
        return vec![Engine::Threads, Engine::Nccl];
    }
    if gloo_is_there() { vec![Engine::Threads, Engine::Gloo] } else { vec![Engine::Threads] }
}

/// Whether this process is one that [`nccl_agrees_with_the_oracle_over_a_stand_in`] has started, or one on a machine with
/// GPUs: `TUNESMITH_TEST_ENGINE=nccl cargo test --test it comm::`.
#[cfg(feature = "cuda")]
fn over_nccl() -> bool {
    std::env::var("TUNESMITH_TEST_ENGINE").as_deref() == Ok("nccl")
}

/// The environment variables that make a process use the stand-ins for NCCL and for `gpus` GPUs.
#[cfg(feature = "cuda")]
pub fn stand_in(gpus: usize) -> [(&'static str, String); 2] {
    let folder = tunesmith::device::cuda::testing::stand_in().display().to_string();
    [("TUNESMITH_CUDA_LIBRARIES", folder), ("TUNESMITH_STAND_IN_DEVICES", gpus.to_string())]
}

/// The ranks of a world, each able to move to a thread.
fn world(engine: Engine, size: usize, limits: Limits) -> Vec<Box<dyn Collectives>> {
    if size == 1 {
        return vec![Box::new(Single)];
    }
    if engine == Engine::Threads {
        return threads::world(size, limits).into_iter().map(|rank| Box::new(rank) as Box<dyn Collectives>).collect();
    }
    let token = RunToken::fresh().unwrap();
    let host = Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap();
    let ranks: Vec<_> = (0..size)
        .map(|rank| {
            let world = World { rank, size, local_rank: rank, local_size: size };
            let endpoint = Endpoint::Launcher(host.address().to_string());
            let launch = Launch { launcher: "test", world, endpoint, token: Some(token.clone()) };
            std::thread::spawn(move || -> Box<dyn Collectives> {
                let meeting = Rendezvous::join(&launch, Facts::new(), Wait::default()).unwrap();
                match engine {
                    #[cfg(feature = "cuda")]
                    Engine::Nccl => Box::new(nccl::Nccl::connect(meeting, rank as u8, limits).unwrap()),
                    _ => Box::new(Gloo::connect(meeting, limits).unwrap()),
                }
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Runs `act` on every rank of a world, and returns the results in the order of ranks.
fn on_all<R: Send>(ranks: &[Box<dyn Collectives>], act: impl Fn(&dyn Collectives) -> R + Sync) -> Vec<R> {
    let act = &act;
    std::thread::scope(|scope| {
        let running: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || act(&**rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The value that rank `rank` holds at `index`, chosen so that sums are not exact in floating point.
fn value(rank: usize, index: usize, seed: u64) -> f64 {
    let mut state = (seed ^ 0x9E37_79B9_7F4A_7C15).wrapping_add((index as u64) << 8 | rank as u64);
    for _ in 0..2 {
        state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        state ^= state >> 27;
    }
    (state >> 11) as f64 / (1u64 << 53) as f64 * 2000.0 - 1000.0
}

/// A type, how a value of it is made, and the plain sum of some in the order of ranks.
trait Kind: Element {
    fn of(value: f64) -> Self;
    fn plain_sum(values: &[Self]) -> Self;
}

macro_rules! kinds {
    ($($type:ty, |$value:ident| $of:expr, |$values:ident| $sum:expr;)*) => {$(
        impl Kind for $type {
            fn of($value: f64) -> Self { $of }
            fn plain_sum($values: &[Self]) -> Self { $sum }
        }
    )*};
}

kinds! {
    f32, |value| value as f32, |values| values[1..].iter().fold(values[0], |sum, value| sum + value);
    f64, |value| value, |values| values[1..].iter().fold(values[0], |sum, value| sum + value);
    bf16, |value| bf16::from_f64(value), |values| bf16::from_f32(values.iter().fold(0.0, |sum, value| sum + value.to_f32()));
    f16, |value| f16::from_f64(value), |values| f16::from_f32(values.iter().fold(0.0, |sum, value| sum + value.to_f32()));
    i64, |value| (value * 1e15) as i64, |values| values.iter().fold(0, |sum: i64, &value| sum.wrapping_add(value));
    u64, |value| value.to_bits(), |values| values.iter().fold(0, |sum: u64, &value| sum.wrapping_add(value));
    u8, |value| value.to_bits() as u8, |values| values.iter().fold(0, |sum: u8, &value| sum.wrapping_add(value));
}

/// Runs every operation on `ranks` and compares it with the oracle.
fn check<T: Kind>(ranks: &[Box<dyn Collectives>], length: usize, root: usize, seed: u64) {
    let size = ranks.len();
    let given = |rank: usize| -> Vec<T> { (0..length).map(|index| T::of(value(rank, index, seed))).collect() };
    let inputs: Vec<Vec<T>> = (0..size).map(given).collect();
    let column = |index: usize| inputs.iter().map(|input| input[index]).collect::<Vec<_>>();
    let sums: Vec<T> = (0..length).map(|index| T::plain_sum(&column(index))).collect();
    let same = |found: &[T], expected: &[T], what: &str| {
        let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
        let name = std::any::type_name::<T>();
        assert!(
            differs.is_none() && found.len() == expected.len(),
            "{what} of {length} {name}, {size} ranks: at {differs:?}"
        );
    };
    let results = on_all(ranks, |comm| {
        let rank = comm.world().rank;
        let mut reduced = inputs[rank].clone();
        comm.all_reduce(&mut reduced).unwrap();
        let mut scattered = inputs[rank].clone();
        let own = comm.reduce_scatter(&mut scattered).unwrap();
        assert_eq!(own, part(length, size, rank));
        let mut gathered = vec![T::ZERO; length];
        gathered[own.clone()].copy_from_slice(&inputs[rank][own.clone()]);
        comm.all_gather(&mut gathered).unwrap();
        let mut sent = inputs[rank].clone();
        comm.broadcast(&mut sent, root).unwrap();
        let said = comm.collect(&inputs[rank][..length.min(3)]).unwrap();
        comm.barrier().unwrap();
        (reduced, scattered, own, gathered, sent, said)
    });
    for (rank, (reduced, scattered, own, gathered, sent, said)) in results.into_iter().enumerate() {
        same(&reduced, &sums, "all_reduce");
        let mut expected = inputs[rank].clone();
        expected[own.clone()].copy_from_slice(&sums[own]);
        same(&scattered, &expected, "reduce_scatter");
        let pieces: Vec<T> = (0..size).flat_map(|rank| inputs[rank][part(length, size, rank)].to_vec()).collect();
        same(&gathered, &pieces, "all_gather");
        same(&sent, &inputs[root], "broadcast");
        let first: Vec<T> = inputs.iter().flat_map(|input| input[..length.min(3)].to_vec()).collect();
        same(&said, &first, "collect");
    }
}

fn check_all_types(ranks: &[Box<dyn Collectives>], length: usize, root: usize, seed: u64) {
    check::<f32>(ranks, length, root, seed);
    check::<f64>(ranks, length, root, seed);
    check::<bf16>(ranks, length, root, seed);
    check::<f16>(ranks, length, root, seed);
    check::<i64>(ranks, length, root, seed);
    check::<u64>(ranks, length, root, seed);
    check::<u8>(ranks, length, root, seed);
}

/// Pieces so small that most sizes need several.
const SMALL: Limits = Limits { timeout: Duration::from_secs(20), bucket: 5000 };

#[test]
fn every_engine_agrees_with_the_oracle_at_the_edges() {
    for engine in engines() {
        for size in 1..=4 {
            let ranks = world(engine, size, SMALL);
            // Nothing, one, fewer than ranks, odd, around the size that is summed at once, several pieces.
            for length in [0, 1, 2, 3, 7, 511, 513, 1024, 4097, 10_001] {
                check_all_types(&ranks, length, size - 1, 7);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn every_engine_agrees_with_the_oracle(
        size in 1usize..=4, length in 0usize..6000, root in 0usize..4, seed: u64, bucket in 8usize..60_000,
    ) {
        for engine in engines() {
            check_all_types(&world(engine, size, Limits { bucket, ..SMALL }), length, root % size, seed);
        }
    }
}

/// 16 Mi elements: 64 MiB of f32 a rank. `just rank-test`.
#[test]
#[ignore = "minutes and 3 GiB"]
fn sixteen_mi_elements() {
    let limits = Limits { timeout: Duration::from_secs(120), ..Limits::default() };
    for engine in engines() {
        for size in 1..=4 {
            let ranks = world(engine, size, limits);
            check::<f32>(&ranks, 16 << 20, size - 1, 3);
            check::<bf16>(&ranks, (16 << 20) + 1, 0, 3);
            if size == 2 {
                check_all_types(&ranks, 16 << 20, 0, 3);
            }
            println!("{engine:?}, {size} ranks: 16 Mi elements as the oracle has them");
        }
    }
}

#[test]
fn a_second_run_and_another_engine_give_the_same_bits() {
    let sum = |engine, bucket| {
        let ranks = world(engine, 3, Limits { bucket, ..SMALL });
        let sums = on_all(&ranks, |comm| {
            let mut data: Vec<f32> = (0..5001).map(|index| value(comm.world().rank, index, 1) as f32).collect();
            comm.all_reduce(&mut data).unwrap();
            data.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(sums.windows(2).all(|pair| pair[0] == pair[1]));
        sums.into_iter().next().unwrap()
    };
    let first = sum(Engine::Threads, 5000);
    for engine in engines() {
        assert_eq!(sum(engine, 5000), first, "{engine:?}");
        assert_eq!(sum(engine, 1 << 20), first, "the size of the pieces moves no bit");
    }
}

#[test]
fn gloo_names_who_is_gone_and_who_is_late() {
    if !gloo_is_there() {
        return;
    }
    // Gone: its connections close, and the others know long before the timeout.
    let mut ranks = world(Engine::Gloo, 3, Limits { timeout: Duration::from_mins(1), ..Limits::default() });
    drop(ranks.pop());
    let began = Instant::now();
    let errors = on_all(&ranks, |comm| comm.all_reduce(&mut [1.0f32; 4000]).unwrap_err());
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.kind(), tunesmith::Kind::Peer);
        assert!(error.message().starts_with(&format!("rank {rank}: all_to_all: rank 2 ended")), "{error}");
    }
    // Late: at the timeout, not before.
    let limits = Limits { timeout: Duration::from_millis(1500), ..Limits::default() };
    let ranks: Arc<Vec<_>> = Arc::new(world(Engine::Gloo, 2, limits));
    let began = Instant::now();
    let error = ranks[0].barrier().unwrap_err();
    assert!(began.elapsed() >= Duration::from_millis(1400), "{:?}", began.elapsed());
    assert!(error.message().starts_with("rank 0: barrier: rank 1 did not answer"), "{error}");
}

/// The tests above, with NCCL in the place of Gloo, where the driver and NCCL are stand-ins: the loader finds them only in a
/// process that starts with their folder in its path.
#[cfg(feature = "cuda")]
#[test]
fn nccl_agrees_with_the_oracle_over_a_stand_in() {
    let tests = ["every_engine_agrees", "a_second_run_and_another", "nccl_alone", "nccl_names_who", "nccl_takes"];
    let mut run = Command::new(std::env::current_exe().unwrap());
    run.args(tests).arg("--include-ignored").env("TUNESMITH_TEST_ENGINE", "nccl").envs(stand_in(8));
    let output = run.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("6 passed"), "{said}");
}

/// Numbers of a GPU are summed and gathered there, with the same bits as elsewhere. Each rank's numbers are still being written
/// when they are asked for, and read on the stream of the ops right after.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs four GPUs with NCCL, or the stand-in"]
fn nccl_takes_numbers_from_gpus() {
    let (lengths, size) = ([40_000, 0, 7, 1001, 300_000], 4);
    let total: usize = lengths.iter().sum();
    let given = |rank: usize| -> Vec<f32> { (0..total).map(|index| value(rank, index, 5) as f32).collect() };
    let column =
        |index: usize| (1..size).fold(value(0, index, 5) as f32, |sum, rank| sum + value(rank, index, 5) as f32);
    let sums: Vec<f32> = (0..total).map(column).collect();
    for shift in [0, 3] {
        // Parts need not be even.
        let parts = |length: usize| -> Vec<std::ops::Range<usize>> {
            let end = |rank: usize| {
                if rank == size { length } else { (part(length, size, rank).start + shift * rank.min(1)).min(length) }
            };
            (0..size).map(|rank| end(rank)..end(rank + 1)).collect()
        };
        let ranks = world(Engine::Nccl, size, Limits { bucket: 50_000, ..Limits::default() });
        let outcomes = on_all(&ranks, |comm| {
            let rank = comm.world().rank;
            let device = Device::Cuda(rank as u8);
            let source = FloatBuffer::of(device, &given(rank));
            let mut values = FloatBuffer::zeros(device, total);
            let mut exchange = PartitionedCollectives::default();
            values.view_mut().copy_from(source.view());
            let pieces = |values: &mut FloatBuffer, act: &mut dyn FnMut(&mut [Piece<'_>])| {
                let (mut rest, mut pieces) = (values.view_mut(), Vec::new());
                for length in lengths {
                    let (now, later) = rest.split_at(length);
                    pieces.push(Piece { values: now, parts: parts(length) });
                    rest = later;
                }
                act(&mut pieces);
            };
            pieces(&mut values, &mut |pieces| exchange.reduce_scatter(comm, pieces).unwrap());
            pieces(&mut values, &mut |pieces| exchange.all_gather(comm, pieces).unwrap());
            // On the stream of the ops, then memory that is given back.
            let copy = values.clone();
            drop(values);
            let mut halves = Array::<bf16>::of(device, &vec![bf16::from_f32(rank as f32 + 1.0); 1003]);
            comm.all_gather_numbers(halves.view_mut()).unwrap();
            (copy.read(), halves.read())
        });
        let halves: Vec<bf16> =
            (0..size).flat_map(|rank| part(1003, size, rank).map(move |_| bf16::from_f32(rank as f32 + 1.0))).collect();
        for (rank, (found, found_halves)) in outcomes.into_iter().enumerate() {
            assert!(found == sums, "rank {rank}: the sums in the order of ranks, to the bit");
            assert!(found_halves == halves, "rank {rank}");
        }
    }
}

/// As on a machine with one GPU.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a GPU with NCCL, or the stand-in"]
fn nccl_alone() {
    let token = RunToken::fresh().unwrap();
    let host = Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap();
    let endpoint = Endpoint::Launcher(host.address().to_string());
    let launch = Launch { launcher: "test", world: World::ALONE, endpoint, token: Some(token) };
    let comm =
        nccl::Nccl::connect(Rendezvous::join(&launch, Facts::new(), Wait::default()).unwrap(), 0, Limits::default())
            .unwrap();
    println!("NCCL {}", nccl::probe().unwrap());
    for length in [0, 1, 1001, 16 << 20] {
        let given: Vec<u8> = (0..length).map(|index| (index * 7 + 3) as u8).collect();
        let (mut data, parts) = (given.clone(), std::slice::from_ref(&(0..length)).to_vec());
        comm.all_gather_bytes(&mut data, &parts).unwrap();
        assert!(data == given);
        comm.broadcast_bytes(&mut data, 0).unwrap();
        let mut received = vec![0; length];
        comm.all_to_all_bytes(&given, &parts, &mut received).unwrap();
        assert!(data == given && received == given);
    }
    comm.barrier().unwrap();
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs three GPUs with NCCL, or the stand-in"]
fn nccl_names_who_is_gone_and_who_is_late() {
    let limits = Limits { timeout: Duration::from_millis(1500), ..Limits::default() };
    let mut ranks = world(Engine::Nccl, 3, limits);
    drop(ranks.pop());
    let errors = on_all(&ranks, |comm| comm.all_reduce(&mut [1.0f32; 4000]).unwrap_err());
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.message().starts_with(&format!("rank {rank}: all_to_all: rank 2 ended")), "{error}");
    }
    let errors = on_all(&ranks, |comm| comm.barrier().unwrap_err());
    assert!(errors.iter().all(|error| error.kind() == tunesmith::Kind::Peer), "nothing more is done");
    let ranks = world(Engine::Nccl, 2, limits);
    let began = Instant::now();
    let error = ranks[0].barrier().unwrap_err();
    assert!(began.elapsed() >= Duration::from_millis(1400), "{:?}", began.elapsed());
    assert!(error.message().starts_with("rank 0: barrier: rank 1 did not answer"), "{error}");
    assert!(error.message().contains("timed out after 1.5s"), "{error}");
}

/// Frames as they are, of which some bytes are others, cut off anywhere: what a fuzz target's inputs grow from.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let text = |bytes: Vec<u8>| [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat();
    let bytes = || proptest::collection::vec(any::<u8>(), 0..40);
    let request =
        (0u8..5, bytes(), bytes()).prop_map(move |(op, name, value)| [vec![op], text(name), text(value)].concat());
    let greeting = (bytes(), any::<u32>(), bytes()).prop_map(move |(claim, rank, rest)| {
        [&b"tsmith02"[..], &[7; 32], &rank.to_le_bytes(), &text(claim), &rest].concat()
    });
    let agent = (any::<u8>(), any::<u64>(), bytes())
        .prop_map(|(there, length, rest)| [&[there % 2][..], &length.to_le_bytes(), &rest].concat());
    let requests = proptest::collection::vec(request, 0..6).prop_map(|all| all.concat());
    let whole = prop_oneof![requests, greeting, agent, proptest::collection::vec(any::<u8>(), 0..300)];
    (whole, proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), any::<prop::sample::Index>())
        .prop_map(|(mut frame, flips, end)| {
            for (at, byte) in flips {
                let length = frame.len().max(1);
                if let Some(old) = frame.get_mut(at.index(length)) {
                    *old = byte;
                }
            }
            frame.truncate(end.index(2 * frame.len() + 1));
            frame
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]
    /// Nothing panics, and nothing is made room for by what is only announced (a length of four GiB would not fit).
    #[test]
    fn whatever_other_processes_send_is_read_to_its_end(frame in frames()) {
        tunesmith::comm::store::read_anything(&frame);
        tunesmith::comm::c10d::read_anything(&frame);
    }
}

#[test]
fn a_missing_gloo_is_one_clear_line() {
    // The variable is this process's: another test may not load the engine meanwhile.
    let missing = Command::new(env!("CARGO_BIN_EXE_tunesmith"))
        .args(["doctor"])
        .env(gloo::LIBRARY_VARIABLE, "/nowhere/lib.so")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&missing.stdout).into_owned();
    assert!(said.lines().any(|line| line.contains("gloo") && line.contains("/nowhere/lib.so")), "{said}");
}
