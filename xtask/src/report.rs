// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a check found.

/// The findings of one check. It passed if nothing was reported.
#[derive(Debug, Default)]
pub struct Report {
    /// What was looked at, in a few words: `11 crates, 9 dependencies`.
    pub summary: String,
    /// Worth reading when this check runs alone.
    pub notes: Vec<String>,
    /// What breaks the rule, each with its place and what to do.
    pub failures: Vec<String>,
}

impl Report {
    /// Reports a breach of the rule.
    pub fn fail(&mut self, what: impl Into<String>) {
        self.failures.push(what.into());
    }

    /// True if nothing was reported.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// Asserts that exactly one thing is wrong and that the message holds `words`. For canaries.
    #[cfg(test)]
    pub fn assert_only_failure(&self, words: &str) {
        assert_eq!(self.failures.len(), 1, "expected one failure, got {:#?}", self.failures);
        assert!(self.failures[0].contains(words), "{:?} does not say {words:?}", self.failures[0]);
    }

    /// Asserts that nothing is wrong.
    #[cfg(test)]
    pub fn assert_passed(&self) {
        assert!(self.passed(), "unexpected failures: {:#?}", self.failures);
    }
}
