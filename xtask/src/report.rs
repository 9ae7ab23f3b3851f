// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the findings of a check.

/// Findings of one check. The check passed if it reported no failure.
#[derive(Debug, Default)]
pub struct Report {
    /// Summary of what was checked, in a few words: `11 crates, 9 dependencies`.
    pub summary: String,
    /// Notes that are printed when this check runs alone.
    pub notes: Vec<String>,
    /// Violations of the rule, each with its place and what to do.
    pub failures: Vec<String>,
}

impl Report {
    /// Reports a violation of the rule.
    pub fn fail(&mut self, what: impl Into<String>) {
        self.failures.push(what.into());
    }

    /// Returns whether nothing was reported.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// Asserts that there is exactly one failure and that its message contains `words`. For canaries.
    #[cfg(test)]
    pub fn assert_only_failure(&self, words: &str) {
        assert_eq!(self.failures.len(), 1, "expected one failure, got {:#?}", self.failures);
        assert!(self.failures[0].contains(words), "{:?} does not say {words:?}", self.failures[0]);
    }

    /// Asserts that there is no failure.
    #[cfg(test)]
    pub fn assert_passed(&self) {
        assert!(self.passed(), "unexpected failures: {:#?}", self.failures);
    }
}
