//! Slurm's short forms: lists of hosts (`gpu[01-04,07],login`) and of counts (`4(x2),3`).

/// The first host of a list.
pub fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let stem = &list[..end];
    let Some(numbers) = list[end..].strip_prefix('[') else { return (!stem.is_empty()).then(|| stem.to_owned()) };
    let (numbers, after) = numbers.split_once(']')?;
    let first = numbers.split([',', '-']).next().filter(|first| !first.is_empty())?;
    // What follows a bracket up to the next host, such as a domain.
    let rest = after.split(',').next().filter(|rest| !rest.contains('['))?;
    Some(format!("{stem}{first}{rest}"))
}

/// How many tasks the machine with number `node` has.
pub fn tasks_of(counts: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in counts.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1usize),
        };
        let count = count.parse().ok()?;
        before += times;
        if node < before {
            return Some(count);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_hosts_and_counts() {
        for (list, first) in [
            ("login", Some("login")),
            ("gpu1,gpu2", Some("gpu1")),
            ("gpu[01-04,07],login", Some("gpu01")),
            ("gpu[7]", Some("gpu7")),
            ("n[3,5].cluster,m1", Some("n3.cluster")),
            ("gpu[", None),
            ("", None),
            ("a[1]b[2]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
        assert_eq!([0, 1, 2, 3].map(|node| tasks_of("4(x2),3", node)), [Some(4), Some(4), Some(3), None]);
        assert_eq!(tasks_of("2(y3)", 0), None);
    }
}
