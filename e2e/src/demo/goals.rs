// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Goals for the figures that are shown, and which of them were met.

use std::fmt::{self, Display, Formatter};

/// A goal for a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// This value or more.
    Least(f64),
    /// This value or less.
    Most(f64),
}

/// A value that is not a number meets no goal.
impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::Least(least) => value >= least,
            Self::Most(most) => value <= most,
        }
    }
}

impl Display for Goal {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Least(least) => write!(f, "at least {least}"),
            Self::Most(most) => write!(f, "at most {most}"),
        }
    }
}

/// The figures that have a goal.
#[derive(Debug, Default)]
pub struct Goals {
    met: usize,
    missed: Vec<String>,
}

impl Goals {
    /// Returns the text beside a figure: empty if it has no goal.
    pub fn beside(&mut self, what: &str, value: f64, goal: Option<Goal>) -> String {
        let Some(goal) = goal else { return String::new() };
        if goal.is_met(value) {
            self.met += 1;
            return format!("{goal}: met");
        }
        self.missed.push(format!("{what}: {value:.1}, {goal}"));
        format!("{goal}: not here")
    }
}

impl Display for Goals {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let all = self.met + self.missed.len();
        writeln!(f, "Done. {all} figures were measured for which there is a goal; {} meet it here.", self.met)?;
        if self.missed.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "Goals are for real machines; an emulated one on shared processors is slower in parts. Off their goals here:"
        )?;
        self.missed.iter().try_for_each(|missed| writeln!(f, "  {missed}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_met_or_missed_and_counted() {
        let mut goals = Goals::default();
        for (value, goal, met) in [
            (8.0, Goal::Least(8.0), true),
            (7.9, Goal::Least(8.0), false),
            (f64::INFINITY, Goal::Least(8.0), true),
            (f64::NAN, Goal::Least(8.0), false),
            (1.9, Goal::Most(2.0), true),
            (2.1, Goal::Most(2.0), false),
            (f64::NAN, Goal::Most(2.0), false),
        ] {
            let said = goals.beside("it", value, Some(goal));
            assert_eq!(said.ends_with(": met"), met, "{value}: {said}");
        }
        assert_eq!(goals.beside("it", 1.0, None), "");
        let text = goals.to_string();
        assert!(
            text.starts_with("Done. 7 figures")
                && text.contains("; 3 meet it")
                && text.matches("\n  it: ").count() == 4,
            "{text}"
        );
    }
}
