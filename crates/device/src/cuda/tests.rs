//! The CUDA layer on the stand-in, and its kernels by the real compiler.
use super::nvrtc::Program;
use super::*;
use crate::gpu;
use crate::{Array, Device, memory as budgets};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith_base::Kind;
use tunesmith_cpu_slice::CpuSlice as _;

static KERNELS: Source = Source::new("testing", include_str!("testing.cu"));

fn on_stand_in<T>(work: impl FnOnce() -> T) -> T {
    testing::use_stand_in();
    budgets::guarded(|| Ok(work())).expect("the stand-in does all that it is told")
}

fn context() -> Arc<Context> {
    testing::use_stand_in();
    Context::new(0).expect("the stand-in has a GPU")
}

#[test]
fn kernels_see_their_arguments_barriers_and_shared_memory() {
    on_stand_in(|| {
        let device = Device::Cuda(0);
        let x: Vec<f32> = (0..150).map(|i| i as f32).collect();
        let (from, to, sums) =
            (Array::of(device, &x), Array::<f32>::zeros(device, 150), Array::<f32>::zeros(device, 3));
        let args = [
            Arg::Address(from.view().address()),
            Arg::F32(0.5),
            Arg::Address(to.view().address()),
            Arg::Address(sums.view().address()),
            Arg::U64(150),
        ];
        gpu::launch(0, &KERNELS, "testing_add", &Grid { blocks: [3, 1, 1], threads: 64, shared: 256 }, &args);
        let expected: Vec<f32> = x.iter().map(|x| x + 0.5).collect();
        assert_eq!(to.read(), expected);
        let of = |part: &[f32]| part.iter().sum::<f32>();
        assert_eq!(sums.read(), expected.chunks(64).map(of).collect::<Vec<_>>());
    });
}

#[test]
fn numbers_of_16_bits_are_those_of_the_half_crate() {
    on_stand_in(|| {
        let device = Device::Cuda(0);
        let odd =
            [0.0, -0.0, 1.0, 1e-8, 6e-8, 5.97e-8, 1e-5, 65_504.0, 65_519.9, 65_520.0, -7e-6, f32::INFINITY, 1e-40, 3.1];
        let mut floats = Vec::from(odd);
        floats.extend((0..18).map(|i| 1.37f32.powi(i * 3 - 30)));
        let (there, words) = (Array::of(device, &floats), Array::<u32>::zeros(device, 32));
        let args = [Arg::Address(there.view().address()), Arg::Address(words.view().address())];
        gpu::launch(0, &KERNELS, "testing_bits", &Grid { blocks: [1, 1, 1], threads: 32, shared: 0 }, &args);
        for ((x, word), back) in floats.iter().zip(words.read()).zip(there.read()) {
            let (narrow, small) = (half::bf16::from_f32(*x), half::f16::from_f32(*x));
            assert_eq!((word & 0xffff, word >> 16), (narrow.to_bits().into(), small.to_bits().into()), "{x}");
            assert_eq!(back, small.to_f32() + 31.0 + 11.0, "{x}");
        }
    });
}

#[test]
fn arrays_grow_keep_parts_and_swap_on_a_gpu() {
    on_stand_in(|| {
        let device = Device::Cuda(1);
        let mut one = Array::of(device, &[1.0f32, 2.0, 3.0]);
        one.reserve(3);
        let place = one.view().address();
        one.append([4.0, 5.0, 6.0][..].into());
        assert_eq!((one.read(), one.view().address()), (vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], place));
        one.keep(1, &(1..4));
        assert_eq!(one.read(), [1.0, 3.0, 4.0, 5.0]);
        let mut other = one.to(Device::Cuda(0));
        other.view_mut().slice(1..3).copy_from(one.slice(0..2));
        assert_eq!(other.read(), [1.0, 1.0, 3.0, 5.0]);
        let mut third = other.to(device);
        one.slice_mut(0..2).swap(third.slice_mut(2..4));
        assert_eq!((one.read(), third.read()), (vec![3.0, 5.0, 4.0, 5.0], vec![1.0, 1.0, 1.0, 3.0]));
        one.view_mut().on_host()[3] += 1.0;
        one.slice_mut(0..1).add(&[0.5]);
        assert_eq!((one.read(), one.clone() == one, one == third), (vec![3.5, 5.0, 4.0, 6.0], true, false));
        one.reset(device, 4);
        assert!(one.view().equal(&[0.0; 4]));
        assert_eq!(one.to(Device::Cpu).view().cpu_slice(), [0.0; 4]);
    });
}

#[test]
fn products_have_any_transposition_and_addend() {
    on_stand_in(|| {
        let device = Device::Cuda(0);
        let (m, n, k) = (5usize, 3usize, 7usize);
        let value = |seed: usize, i: usize| ((i * 7 + seed * 13) % 17) as f32 / 8.0 - 1.0;
        let a: Vec<f32> = (0..m * k).map(|i| value(1, i)).collect();
        let b: Vec<f32> = (0..k * n).map(|i| value(2, i)).collect();
        let c: Vec<f32> = (0..m * n).map(|i| value(3, i)).collect();
        let [ad, bd, cd] = [&a, &b, &c].map(|values| Array::of(device, values));
        for (turn_a, turn_b, beta) in [(false, false, 0.0), (true, false, 1.0), (false, true, 0.5), (true, true, 1.0)] {
            let out = Array::<f32>::zeros(device, m * n);
            let operand = |array: &Array<f32>, leading: usize, transposed| Operand {
                address: array.view().address(),
                number: Number::F32.into(),
                leading: leading as u64,
                transposed,
                batch_stride: 0,
            };
            let product = Product {
                m: m as u64,
                n: n as u64,
                k: k as u64,
                alpha: 2.0,
                beta,
                a: operand(&ad, if turn_a { k } else { m }, turn_a),
                b: operand(&bd, if turn_b { n } else { k }, turn_b),
                c: operand(&cd, m, false),
                d: operand(&out, m, false),
                batch: 1,
                tf32: false,
            };
            gpu::matmul(0, &product);
            for (at, found) in out.read().into_iter().enumerate() {
                let (row, col) = (at % m, at / m);
                let of_a = |i: usize| a[if turn_a { row * k + i } else { i * m + row }];
                let of_b = |i: usize| b[if turn_b { i * n + col } else { col * k + i }];
                let sum: f32 = (0..k).map(|i| of_a(i) * of_b(i)).sum();
                assert!((found - (2.0 * sum + beta * c[at])).abs() < 1e-5, "{turn_a} {turn_b} [{row}, {col}]");
            }
        }
    });
}

#[test]
fn a_batch_of_products_takes_each_matrix_from_its_place() {
    on_stand_in(|| {
        let device = Device::Cuda(0);
        let (m, n, k, batch) = (2usize, 3usize, 4usize, 3usize);
        // Strides that no alignment beyond a number's own divides; what lies between matrices stays as it is.
        let (of_a, of_b, of_d) = (m * k + 1, k * n + 3, m * n + 5);
        let a: Vec<f32> = (0..of_a * batch).map(|i| (i % 11) as f32 - 5.0).collect();
        let b: Vec<f32> = (0..of_b * batch).map(|i| (i % 7) as f32 - 3.0).collect();
        let (ad, bd, out) =
            (Array::of(device, &a), Array::of(device, &b), Array::of(device, &vec![9.0f32; of_d * batch]));
        let operand = |array: &Array<f32>, leading: usize, stride: usize| Operand {
            address: array.view().address(),
            number: Number::F32.into(),
            leading: leading as u64,
            transposed: false,
            batch_stride: stride as u64,
        };
        let d = operand(&out, m, of_d);
        gpu::matmul(
            0,
            &Product {
                m: m as u64,
                n: n as u64,
                k: k as u64,
                alpha: 1.0,
                beta: 0.0,
                a: operand(&ad, m, of_a),
                b: operand(&bd, k, of_b),
                c: d,
                d,
                batch: batch as u32,
                tf32: false,
            },
        );
        for (at, found) in out.read().into_iter().enumerate() {
            let (one, inside) = (at / of_d, at % of_d);
            let (row, col) = (inside % m, inside / m);
            let sum = |col: usize| (0..k).map(|i| a[one * of_a + i * m + row] * b[one * of_b + col * k + i]).sum();
            let expected: f32 = if inside < m * n { sum(col) } else { 9.0 };
            assert_eq!(found, expected, "matrix {one}, [{row}, {col}]");
        }
    });
}

#[test]
fn any_thread_may_use_a_stream() {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let memory = Memory::new(&stream, 256).unwrap();
    let mut host = PinnedMemory::new(&context, 256).unwrap();
    std::thread::scope(|scope| {
        // A new thread has no current context.
        scope.spawn(|| {
            // SAFETY: both have 256 bytes, which live until the event has happened.
            unsafe {
                stream.fill(memory.address(), 3, 256).unwrap();
                stream.copy_to_host(host.as_mut_slice().as_mut_ptr(), memory.address(), 256).unwrap();
            }
            stream.record().unwrap().synchronize().unwrap();
        });
    });
    assert!(host.as_slice().iter().all(|&byte| byte == 3));
}

#[test]
fn events_order_streams() {
    let context = context();
    let (one, other) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let memory = Memory::new(&one, 1024).unwrap();
    let mut host = PinnedMemory::new(&context, 1024).unwrap();
    assert!(host.as_slice().iter().all(|&byte| byte == 0));
    let start = one.record().unwrap();
    // SAFETY: both have 1,024 bytes, which live until the streams are synchronised.
    unsafe {
        one.fill(memory.address(), 7, memory.bytes()).unwrap();
        let filled = one.record().unwrap();
        other.wait(&filled).unwrap();
        other.copy_to_host(host.as_mut_slice().as_mut_ptr(), memory.address(), 1024).unwrap();
        filled.synchronize().unwrap();
        assert!(filled.done().unwrap() && filled.milliseconds_since(&start).unwrap() >= 0.0);
    }
    other.synchronize().unwrap();
    assert!(host.as_slice().iter().all(|&byte| byte == 7));
    release(&one).unwrap();
}

#[test]
fn memory_is_counted_and_a_budget_holds() {
    on_stand_in(|| {
        let device = Device::Cuda(1);
        budgets::reset_peak(device);
        drop(Array::<f32>::zeros(device, 1 << 20));
        // Other tests take and give back some bytes there meanwhile.
        assert!(budgets::peak(device) >= 4 << 20);
    });
    let too_much = || budgets::guarded(|| Ok(Array::<f32>::zeros(Device::Cuda(1), 2 << 30)));
    let error = too_much().unwrap_err();
    assert_eq!(error.kind(), Kind::Memory);
    assert!(error.message().starts_with("GPU 1 has no 8.00 GiB more"), "{error}");
}

#[test]
fn what_is_not_there_is_named() {
    let context = context();
    let error = Context::new(7).unwrap_err();
    assert_eq!(
        (error.kind(), error.message()),
        (Kind::Device, "there is no GPU 7: the driver shows 2, numbers 0 to 1")
    );
    let module = Module::load(&context, &KERNELS).unwrap();
    let error = module.function("testing_none").unwrap_err();
    assert!(error.message().contains("testing_none") && error.message().contains("CUDA_ERROR_NOT_FOUND"), "{error}");
    let error = Module::load(&context, &Source::new("refused", "#error stand-in")).unwrap_err();
    assert!(error.message().contains("refused") && error.message().contains("NVRTC_ERROR_COMPILATION"), "{error}");
    let names: Vec<_> = library::report().into_iter().map(|it| (it.name, it.found.is_ok())).collect();
    assert_eq!(names, [("CUDA driver", true), ("NVRTC", true), ("cublasLt", true)]);
}

#[test]
fn what_was_compiled_is_used_again_unless_it_is_damaged() {
    let context = context();
    let text: &'static str = Box::leak(format!("// {}\n", std::process::id()).into_boxed_str());
    let source = Source::new("damaged", text);
    Module::load(&context, &source).unwrap();
    let program = Program::new(&source, context.capability()).unwrap();
    let kept = program.kept().expect("the cubin is kept");
    // What loads is taken as it is, and not compiled and kept anew.
    let marked = [&kept[..], b"marked"].concat();
    program.keep(&marked);
    Module::load(&context, &source).unwrap();
    assert_eq!(program.kept(), Some(marked));
    program.keep(b"damaged");
    Module::load(&context, &source).unwrap();
    assert_eq!(program.kept(), Some(kept));
    program.forget();
}

/// Compiles every kernel of the tree by the NVRTC of the active Python environment, and prints registers.
#[test]
#[ignore = "needs NVRTC: scripts/just kernel-check"]
fn the_real_compiler_takes_every_kernel_without_spills() {
    let mut sources = Vec::new();
    find(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap(), &mut sources);
    sources.sort();
    assert!(sources.len() > 20);
    for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
        let mut most = (0, String::new());
        let (mut kernels, mut without_spills) = (0, 0);
        for path in &sources {
            let name: &'static str =
                Box::leak(path.file_stem().unwrap().to_string_lossy().into_owned().into_boxed_str());
            let text: &'static str = Box::leak(std::fs::read_to_string(path).unwrap().into_boxed_str());
            let headers = headers_beside(path);
            let sources = if text.contains("TYPED(") {
                let typed = |number| Source::typed(name, text, number).with_headers(headers);
                Vec::from([Number::F32, Number::F16, Number::Bf16].map(typed))
            } else {
                vec![Source::new(name, text).with_headers(headers)]
            };
            let mut log = String::new();
            for source in &sources {
                let program = Program::new(source, capability).unwrap();
                let (image, more) = program
                    .compile_with(&["--ptxas-options=-v"])
                    .unwrap_or_else(|error| panic!("{name}: {error}; {}", error.hint_text().unwrap_or_default()));
                assert!(image.len() > 100, "{name}");
                log.push_str(&more);
                log.push('\n');
            }
            let mut kernel = "";
            for line in log.lines() {
                if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                    kernel = rest.split('\'').next().unwrap_or(rest);
                }
                if line.contains("spill stores") {
                    // With what stands before it: 40 bytes end in "0 bytes" too.
                    assert!(line.contains(", 0 bytes spill stores, 0 bytes spill loads"), "{name}: {kernel}: {line}");
                    without_spills += 1;
                }
                if let Some((_, rest)) = line.split_once("Used ") {
                    let registers: u32 = rest.split(' ').next().unwrap().parse().unwrap();
                    let _ = writeln!(
                        std::io::stdout(),
                        "sm_{}{} {kernel}: {registers} registers",
                        capability.0,
                        capability.1
                    );
                    kernels += 1;
                    if registers > most.0 {
                        most = (registers, kernel.to_owned());
                    }
                }
            }
        }
        assert!(
            kernels > sources.len() && without_spills >= kernels,
            "{kernels} kernels, {without_spills} without spills"
        );
        let _ = writeln!(
            std::io::stdout(),
            "sm_{}{}: {kernels} kernels of {} sources without spills; the most registers: {} ({})",
            capability.0,
            capability.1,
            sources.len(),
            most.0,
            most.1
        );
    }
}

/// The headers in a source's folder, but for the one that all have.
fn headers_beside(source: &Path) -> &'static [Header] {
    let mut headers: Vec<Header> = Vec::new();
    for entry in std::fs::read_dir(source.parent().unwrap()).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|end| end == "cuh") && !path.ends_with("dev.cuh") {
            let name = Box::leak(path.file_name().unwrap().to_string_lossy().into_owned().into_boxed_str());
            headers.push((name, Box::leak(std::fs::read_to_string(&path).unwrap().into_boxed_str())));
        }
    }
    headers.sort_unstable();
    headers.leak()
}

fn find(folder: &Path, sources: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            find(&path, sources);
        } else if path.extension().is_some_and(|end| end == "cu") {
            sources.push(path);
        }
    }
}
