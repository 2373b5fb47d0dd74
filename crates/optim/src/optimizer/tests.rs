//! Shares of an optimizer against the whole, for every optimizer and number of ranks.
use super::super::rule;
use super::*;
use tunesmith_comm::Partition;
use tunesmith_config::{Optim, TrainConfig};
use tunesmith_device::Device;

/// Tensors of three segments, some large enough for moments of 8 bits, some shorter than a cut.
fn slots() -> (Vec<Slot>, Vec<usize>) {
    let shapes: [(&str, &[usize]); 7] = [
        ("model.embed_tokens.weight", &[70, 61]),
        ("one.weight", &[64, 65]),
        ("one.bias", &[64]),
        ("one.norm", &[3]),
        ("two.weight", &[33, 160]),
        ("two.lora_A.weight", &[4, 32]),
        ("two.lora_B.weight", &[32, 4]),
    ];
    let slot = |(name, shape): &(&str, &[usize])| {
        let decay = shape.len() > 1;
        let (lr_scale, vision) = (if decay { 1.0 } else { 2.0 }, name.starts_with("one"));
        Slot { name: (*name).to_owned(), shape: shape.to_vec(), decay, lr_scale, vision }
    };
    let slots: Vec<Slot> = shapes.iter().map(slot).collect();
    let ends = |count: usize| slots[..count].iter().map(Slot::count).sum();
    let segments = vec![0, ends(1), ends(4), ends(4), ends(7)];
    (slots, segments)
}

fn number(stream: usize, index: usize) -> f32 {
    ((stream * 7919 + index * 104_729) % 10_007) as f32 / 5000.0 - 1.0
}

fn packed(whole: &[f32], owned: &[Range<usize>]) -> Vec<f32> {
    owned.iter().flat_map(|range| whole[range.clone()].to_vec()).collect()
}

#[test]
fn every_optimizer_gives_the_same_bits_whole_and_in_shares() {
    let (slots, segments) = slots();
    let length = segments[segments.len() - 1];
    for &optim in Optim::ALL {
        let train = TrainConfig { optim, weight_decay: 0.1, ..TrainConfig::default() };
        let rule = || rule(&train).unwrap();
        let start: Vec<f32> = (0..length).map(|index| number(1, index)).collect();
        for ranks in [2, 3, 4, 7] {
            let partition = Partition::new(&segments, ranks, legal_cuts(&*rule(), &slots));
            let mut shares: Vec<_> = (0..ranks)
                .map(|rank| {
                    let owned = partition.owned(rank);
                    let share = Optimizer::shared(rule(), slots.clone(), (&start).into(), &owned, false);
                    // Every other rank in packed buffers.
                    let values = if rank % 2 == 0 { start.clone() } else { packed(&start, &owned) };
                    (share, values, owned)
                })
                .collect();
            let mut whole = (Optimizer::new(rule(), slots.clone(), &start), start.clone());
            for step in 2..6 {
                let grads: Vec<f32> = (0..length).map(|index| number(step, index)).collect();
                whole.0.images = step != 3;
                whole.0.update(&mut whole.1, &grads, 0.5, 0.01);
                for (share, values, owned) in &mut shares {
                    share.images = step != 3;
                    let own = packed(&grads, owned);
                    share.update(values, if step % 2 == 0 { &own } else { &grads }, 0.5, 0.01);
                }
            }
            let mut published = whole.1.clone();
            whole.0.publish(&mut published);
            for (share, values, owned) in &shares {
                let own = |buffer: &[f32]| if buffer.len() == length { packed(buffer, owned) } else { buffer.to_vec() };
                assert!(own(values) == packed(&whole.1, owned), "{optim:?}, {ranks} ranks: values");
                let mut averages = values.clone();
                share.publish(&mut averages);
                assert!(own(&averages) == packed(&published, owned), "{optim:?}, {ranks} ranks: averages");
                assert_eq!(share.scalars(), whole.0.scalars());
            }
            // The shares of the state, put together, are the state.
            for (tensor, (name, _, state)) in whole.0.state().iter().zip(whole.0.tensors()) {
                assert_eq!(tensor.name, name);
                let mut found = State::zeros(Device::Cpu, false, tensor.spec.dtype, tensor.spec.count());
                let mut filled = 0;
                for (share, ..) in &shares {
                    for (range, numbers) in share.owned(tensor) {
                        filled += range.len();
                        match (&mut found, numbers) {
                            (State::F32(to), State::F32(from)) => to.slice_mut(range).copy_from(from.view()),
                            (State::U8(to), State::U8(from)) => to.slice_mut(range).copy_from(from.view()),
                            _ => panic!("{name}: two types"),
                        }
                    }
                }
                assert_eq!(filled, tensor.spec.count(), "{optim:?} {name}: each number once");
                assert!(found == *state, "{optim:?}, {ranks} ranks: {name}");
            }
        }
    }
}

#[test]
fn every_optimizer_gives_the_same_bits_with_its_state_on_the_host() {
    tunesmith_device::cuda::testing::use_stand_in();
    let device = Device::Cuda(0);
    let (slots, segments) = slots();
    let length = segments[segments.len() - 1];
    for &optim in Optim::ALL {
        let train = TrainConfig { optim, weight_decay: 0.1, ..TrainConfig::default() };
        let rule = || rule(&train).unwrap();
        let start: Vec<f32> = (0..length).map(|index| number(1, index)).collect();
        // All of it, and what the second of three ranks owns.
        let partition = Partition::new(&segments, 3, legal_cuts(&*rule(), &slots));
        for owned in [std::iter::once(0..length).collect(), partition.owned(1)] {
            let fresh = |offload: bool| {
                let values = FloatBuffer::of(device, &start);
                (Optimizer::shared(rule(), slots.clone(), values.view(), &owned, offload), values)
            };
            let ((mut one, mut values), (mut other, mut same)) = (fresh(false), fresh(true));
            assert!(other.tensors().iter().all(|(_, _, state)| state.offloaded() == Some(device)), "{optim:?}");
            for step in 2..6 {
                (one.images, other.images) = (step != 4, step != 4);
                let grads: Vec<f32> = (0..length).map(|index| number(step, index)).collect();
                let narrow: Vec<bf16> = grads.iter().copied().map(bf16::from_f32).collect();
                let (grads, narrow) = (FloatBuffer::of(device, &grads), tunesmith_device::Array::of(device, &narrow));
                let grads = || if step == 3 { Gradients::Bf16(narrow.view()) } else { Gradients::F32(grads.view()) };
                one.update(&mut values, grads(), 0.5, 0.01);
                other.update(&mut same, grads(), 0.5, 0.01);
            }
            assert!(values == same, "{optim:?}: values");
            for ((name, _, on_gpu), (_, _, on_host)) in one.tensors().into_iter().zip(other.tensors()) {
                assert!(on_gpu.read() == on_host.read(), "{optim:?}: {name}");
            }
            one.publish(&mut values);
            other.publish(&mut same);
            assert!(values == same, "{optim:?}: averages");
        }
    }
}

/// Tensors of images have the values and the state of an optimizer that never saw the step without images.
#[test]
fn a_step_without_images_does_not_exist_for_tensors_of_images() {
    let (slots, segments) = slots();
    let length = segments[segments.len() - 1];
    // The second segment is that of images.
    let own = segments[1]..segments[2];
    for &optim in Optim::ALL {
        let train = TrainConfig { optim, weight_decay: 0.1, ..TrainConfig::default() };
        let start: Vec<f32> = (0..length).map(|index| number(1, index)).collect();
        let images = slots.iter().filter(|slot| slot.vision).cloned().collect();
        let (mut all, mut alone) = (start.clone(), start[own.clone()].to_vec());
        let mut of_all = Optimizer::new(rule(&train).unwrap(), slots.clone(), &all);
        let mut of_images = Optimizer::new(rule(&train).unwrap(), images, &alone);
        let mut rates = [0.01, 0.02, 0.03].into_iter();
        for shows in [true, false, true] {
            let grads: Vec<f32> = (0..length).map(|index| number(2 + usize::from(shows), index)).collect();
            let (before, rate) = (all.clone(), rates.next().unwrap());
            of_all.images = shows;
            of_all.update(&mut all, &grads, 0.5, rate);
            assert_eq!(all[own.clone()] != before[own.clone()], shows, "{optim:?}");
            assert!(all[..own.start] != before[..own.start], "{optim:?}");
            if shows {
                of_images.update(&mut alone, &grads[own.clone()], 0.5, rate);
            }
        }
        assert_eq!([of_all.step, of_all.image_step, of_images.step], [3, 2, 2]);
        // Schedule-free averages weigh each step of the run by its rate.
        if !of_all.averages() {
            assert!(all[own.clone()] == alone[..], "{optim:?}: values");
            for (name, _, state) in of_images.tensors() {
                let found = of_all.tensors().into_iter().find(|(other, ..)| *other == name).unwrap();
                assert!(found.2 == state, "{optim:?}: {name}");
            }
        }
        of_all.uncount();
        of_all.images = false;
        of_all.uncount();
        assert_eq!([of_all.step, of_all.image_step], [1, 1]);
    }
}

/// Moments that shrink from step to step, and squares that are too small from the first. Not Lion's momentum: its sign decides however small it is.
#[test]
fn no_optimizer_keeps_subnormal_numbers() {
    let (slots, segments) = slots();
    let length = segments[segments.len() - 1];
    for &optim in Optim::ALL.iter().filter(|&&optim| optim != Optim::Lion) {
        let train = TrainConfig { optim, ..TrainConfig::default() };
        let mut values: Vec<f32> = (0..length).map(|index| number(1, index)).collect();
        for size in [1e-35, 1e-18] {
            let mut optimizer = Optimizer::new(rule(&train).unwrap(), slots.clone(), &values);
            let grads: Vec<f32> = (0..length).map(|index| size * number(2, index)).collect();
            optimizer.update(&mut values, &grads, 1.0, 0.01);
            for _ in 0..100 {
                optimizer.update(&mut values, &vec![0.0; length], 1.0, 0.01);
            }
            for (name, _, state) in optimizer.tensors() {
                let State::F32(numbers) = state else { continue };
                let numbers = numbers.view().to_host();
                assert!(!numbers.iter().any(|number| number.is_subnormal()), "{optim:?}, gradients of {size}: {name}");
            }
        }
    }
}

#[test]
fn the_registry_says_of_every_optimizer_whether_it_averages() {
    for &optim in Optim::ALL {
        let train = TrainConfig { optim, ..TrainConfig::default() };
        assert_eq!(rule(&train).unwrap().averages(), optim.averages(), "{optim}");
    }
}

#[test]
fn cuts_fall_on_blocks_and_between_tensors() {
    let (slots, _) = slots();
    let cut = |optim, at| {
        let train = TrainConfig { optim, ..TrainConfig::default() };
        legal_cuts(&*rule(&train).unwrap(), &slots)(at)
    };
    assert_eq!(cut(Optim::AdamW, 4271), 4271);
    // The second tensor of 4160 values begins at 4270.
    assert_eq!(cut(Optim::AdamW8bit, 4271), 4270);
    assert_eq!(cut(Optim::AdamW8bit, 4270 + 200), 4270 + 256);
    assert_eq!(cut(Optim::AdamW8bit, 4270 + 4159), 4270 + 4160, "the last block is shorter");
    assert_eq!(cut(Optim::AdamW8bit, 4270 + 4160 + 7), 4270 + 4160 + 7, "moments of four bytes");
    assert_eq!(cut(Optim::Muon, 4270 + 4000), 4270 + 4160);
    assert_eq!(cut(Optim::Muon, 4270 + 100), 4270);
    assert_eq!(cut(Optim::Muon, 100), 100, "the embedding is AdamW's");
    assert_eq!(cut(Optim::Adafactor, 100), 0);
    assert_eq!(cut(Optim::Adafactor, 1 << 20), 1 << 20);
}

#[test]
fn a_factor_that_is_found_on_a_gpu_gives_the_bits_of_one_that_is_known_and_nan_changes_nothing() {
    tunesmith_device::cuda::testing::use_stand_in();
    let device = Device::Cuda(0);
    let (slots, segments) = slots();
    let length = segments[segments.len() - 1];
    let start: Vec<f32> = (0..length).map(|index| number(1, index)).collect();
    let mut found = 0;
    for &optim in Optim::ALL {
        let train = TrainConfig { optim, weight_decay: 0.1, ..TrainConfig::default() };
        let rule = || rule(&train).unwrap();
        if !rule().takes_found_factor() {
            continue;
        }
        found += 1;
        let fresh = || {
            let values = FloatBuffer::of(device, &start);
            (Optimizer::new(rule(), slots.clone(), values.view()), values)
        };
        let ((mut known, mut values), (mut other, mut same)) = (fresh(), fresh());
        let [half, nan] = [0.5, f32::NAN].map(|factor| FloatBuffer::of(device, &[factor]));
        for step in 2..5 {
            let grads: Vec<f32> = (0..length).map(|index| number(step, index)).collect();
            let grads = FloatBuffer::of(device, &grads);
            known.update(&mut values, grads.view(), 0.5, 0.01);
            other.update(&mut same, grads.view(), Factor::Found(half.view()), 0.01);
            // A step that is skipped.
            other.update(&mut same, grads.view(), Factor::Found(nan.view()), 0.01);
            other.uncount();
        }
        assert_eq!(known.step, other.step);
        assert!(values == same, "{optim:?}: values");
        for ((name, _, one), (_, _, two)) in known.tensors().into_iter().zip(other.tensors()) {
            assert!(one.read() == two.read(), "{optim:?}: {name}");
        }
    }
    assert!(found >= 4, "AdamW, its form of 8 bits, SGD and Lion");
}
