//! How often something happens in a run: every so many steps, or at a share of all steps.
use super::value::{ConfigValue, Node, Refusal};
use serde_json::{Value as Json, json};

/// A number of steps, or a share of all steps of a run, as in Transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Interval {
    /// Steps, at least 1.
    Steps(u64),
    /// A share of all steps, between 0 and 1.
    Share(f64),
}

impl Interval {
    /// The number of steps in a run of `total` steps. A share is rounded up, as in Transformers; it is at least one step.
    pub fn steps(self, total: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Share(share) => ((total as f64 * share).ceil() as u64).max(1),
        }
    }

    /// Whether each multiple of this interval may be one of `other`: the check before the number of steps is known.
    pub fn may_be_multiple_of(self, other: Self) -> bool {
        match (self, other) {
            (Self::Steps(steps), Self::Steps(other)) => steps.is_multiple_of(other),
            (Self::Share(share), Self::Share(other)) => (share / other - (share / other).round()).abs() < 1e-6,
            _ => false,
        }
    }
}

impl ConfigValue for Interval {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Float(share) if *share > 0.0 && *share < 1.0 => Ok(Self::Share(*share)),
            _ => u64::from_node(node).ok().filter(|steps| *steps > 0).map(Self::Steps).ok_or_else(|| {
                let hint = u64::from_node(node).err().and_then(|refusal| refusal.hint);
                Refusal { hint, ..Refusal::new(node, Self::expected()) }
            }),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::Steps(steps) => (*steps).into(),
            Self::Share(share) => (*share).into(),
        }
    }

    fn expected() -> String {
        "an integer, at least 1, or a share of all steps, between 0 and 1".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [
            { "type": "integer", "minimum": 1 },
            { "type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1 }
        ] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_rounded_up_as_in_transformers() {
        assert_eq!([10, 101].map(|total| Interval::Share(0.1).steps(total)), [1, 11]);
        assert_eq!([Interval::Share(0.001).steps(10), Interval::Steps(7).steps(10)], [1, 7]);
    }

    #[test]
    fn only_intervals_of_one_kind_are_multiples() {
        use Interval::{Share, Steps};
        assert!(Steps(6).may_be_multiple_of(Steps(3)) && Share(0.3).may_be_multiple_of(Share(0.1)));
        assert!(!Steps(6).may_be_multiple_of(Share(0.1)) && !Share(0.25).may_be_multiple_of(Share(0.1)));
    }
}
