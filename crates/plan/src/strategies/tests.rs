//! The table of strategies on machines of several sizes.
use super::*;
use crate::memory::testing::{arch, job};

fn planned(memory: u64, full: bool) -> Plan {
    let arch = arch();
    let machine = Machine { device: Device::Gpu, ranks: 4, memory };
    let batch = Batch { rows: 2, length: 128, most: None };
    plan(&Predictor::new(job(&arch, full), Device::Gpu), &machine, &batch, 4096)
}

fn total(plan: &Plan, name: &str) -> u64 {
    plan.rows.iter().find(|row| row.way.name() == name).map_or(0, |row| row.total)
}

#[test]
fn what_is_shared_shrinks_and_the_fastest_that_fits_is_taken() {
    let all = planned(1 << 40, true);
    let ways = ["ddp", "zero1", "zero2", "zero3", "zero3 + offload"];
    assert!(total(&all, "ddp + offload") < total(&all, "ddp"));
    let totals = ways.map(|name| total(&all, name));
    assert!(totals.windows(2).all(|pair| pair[0] > pair[1] && pair[1] > 0), "{totals:?}");
    assert_eq!(total(&all, "fsdp"), total(&all, "zero3"));
    for (name, need) in ways.into_iter().zip(totals) {
        let taken = planned(need + need / 10, true);
        let chosen = taken.recommended.map(|at| taken.rows[at].way.name()).unwrap_or_default();
        let same = chosen == name || chosen == name.replace("zero3", "fsdp");
        assert!(same || total(&taken, &chosen) > need, "{name} needs {need}: {chosen}, {}", taken.reason);
    }
}

#[test]
fn where_nothing_fits_it_says_what_would_help() {
    let none = planned(650 << 20, false);
    assert_eq!(none.recommended, None);
    assert!(none.reason.starts_with("nothing fits"), "{}", none.reason);
    assert!(none.helps.windows(2).all(|pair| pair[0].1 <= pair[1].1) && !none.helps.is_empty(), "{:?}", none.helps);
}

#[test]
fn the_greatest_that_fits_is_found() {
    assert_eq!([0, 1, 7, 100].map(|most| greatest(64, |it| it <= most)), [0, 1, 7, 64]);
}
