// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Adds up the results that tests print.

use super::need::Required;
use std::fmt;

/// Largest number of failed tests that are run once more. More failures than that are no matter of chance.
const REPEATED: usize = 3;

/// Results of a tier's tests, read line by line from libtest's output.
///
/// A test that cannot run here prints `SKIP name (needs thing): why` on standard error and returns. libtest counts it
/// as passed; the tally counts it as skipped, or as failed if the thing is required.
#[derive(Debug, Default)]
pub struct Tally {
    /// Number of passed tests as libtest counts, including the tests that skipped themselves.
    passed: u64,
    failed: u64,
    ignored: u64,
    /// Names of the tests that skipped themselves.
    skips: Vec<String>,
    canaries: u64,
    names: Vec<String>,
    failures: Vec<String>,
    /// Names of the tests that failed at first and passed when they ran once more, alone.
    repeated: Vec<String>,
    /// Number of programs that began to test, and that reported a result. A program that crashed reports none.
    begun: u64,
    ended: u64,
    /// The program whose tests run now, and the seconds that each program's tests took.
    program: String,
    seconds: Vec<(String, f64)>,
    required: Required,
}

impl Tally {
    /// Makes an empty tally with the needs of `TOMBOLO_REQUIRE`.
    pub fn new(required: Required) -> Self {
        Self { required, ..Self::default() }
    }

    /// Makes the tally of a tier that was skipped as a whole: one skip, or one failure.
    pub fn of_skipped_tier(failed: bool) -> Self {
        Self { failed: u64::from(failed), ignored: u64::from(!failed), ..Self::default() }
    }

    /// Adds one line of output.
    pub fn line(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            self.ended += 1;
            self.add_totals(result);
            self.add_seconds(result);
        } else if let Some(program) = line.trim_start().strip_prefix("Running ") {
            self.program = program.split(" (").next().unwrap_or(program).to_owned();
        } else if line.starts_with("running ") && (line.ends_with(" tests") || line.ends_with(" test")) {
            self.begun += 1;
        } else if let Some((name, end)) = line.strip_prefix("test ").and_then(|l| l.rsplit_once(" ... ")) {
            self.add_test(name, end);
        } else if let Some(skip) = line.strip_prefix("SKIP ") {
            self.add_skip(skip);
        }
    }

    /// Adds the totals of a line `ok. 2 passed; 0 failed; 1 ignored; …`.
    fn add_totals(&mut self, result: &str) {
        for part in result.split(['.', ';']) {
            let Some((count, what)) = part.trim().split_once(' ') else { continue };
            let count = count.parse().unwrap_or(0);
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }

    /// Adds the seconds of a line `…; finished in 0.12s`.
    fn add_seconds(&mut self, result: &str) {
        let took = result.rsplit_once("finished in ").and_then(|(_, took)| took.trim_end_matches('s').parse().ok());
        self.seconds.extend(took.map(|took| (self.program.clone(), took)));
    }

    fn add_test(&mut self, name: &str, end: &str) {
        match end.split_whitespace().next() {
            Some("ok") => {
                self.canaries += u64::from(name.contains("canary"));
                self.names.push(name.to_owned());
            }
            Some("FAILED") => self.failures.push(name.to_owned()),
            _ => {}
        }
    }

    /// Adds a skip: `name (needs thing): why`.
    fn add_skip(&mut self, skip: &str) {
        let need = skip.split_once("(needs ").and_then(|(_, rest)| rest.split_once(')')).map_or("", |(need, _)| need);
        self.skips.push(skip.split([' ', ':']).next().unwrap_or_default().to_owned());
        if self.required.contains(need) {
            self.failures.push(format!("SKIP {skip}"));
        }
    }

    /// Returns the number of tests that ran and passed.
    pub fn passed(&self) -> u64 {
        self.passed.saturating_sub(self.skips.len() as u64)
    }

    /// Returns the number of tests that failed, including those that skipped themselves for lack of a required need.
    pub fn failed(&self) -> u64 {
        self.failed + self.skips_refused()
    }

    /// Returns the number of tests that were ignored or skipped themselves with good reason.
    pub fn skipped(&self) -> u64 {
        self.ignored + self.skips.len() as u64 - self.skips_refused()
    }

    /// Returns the number of all tests counted.
    pub fn total(&self) -> u64 {
        self.passed() + self.failed() + self.skipped()
    }

    /// Returns the names of the tests that failed, if they are few enough to be run once more, and nothing else failed.
    pub fn repeatable(&self) -> Option<Vec<&str>> {
        let few = (1..=REPEATED).contains(&self.failures.len()) && self.failed == self.failures.len() as u64;
        (few && self.begun <= self.ended)
            .then(|| self.failures.iter().map(|name| name.split(" - ").next().unwrap_or(name)).collect())
    }

    /// Adds the results of the failed tests when they ran once more: if each has passed now, none counts as failed.
    /// Returns whether each has passed.
    pub fn repeat(&mut self, again: &Self) -> bool {
        let passed: Vec<&str> = again.proofs().collect();
        let all = again.failed() == 0 && self.failures.iter().all(|name| passed.contains(&name.as_str()));
        if all {
            self.passed += self.failed;
            self.failed = 0;
            self.canaries += again.canaries;
            self.names.extend_from_slice(&self.failures);
            self.repeated.append(&mut self.failures);
        }
        all
    }

    /// Returns the names of the tests that passed only when they ran once more.
    pub fn repeated(&self) -> &[String] {
        &self.repeated
    }

    /// Returns the number of passed tests with `canary` in their name.
    pub fn canaries(&self) -> u64 {
        self.canaries
    }

    /// Returns the names of the tests that ran and passed.
    pub fn proofs(&self) -> impl Iterator<Item = &str> {
        let skipped = |name: &str| self.skips.iter().any(|skip| name.rsplit("::").next() == Some(skip));
        self.names.iter().map(String::as_str).filter(move |name| !skipped(name))
    }

    /// Names of the tests that skipped themselves.
    pub fn skips(&self) -> &[String] {
        &self.skips
    }

    /// Returns the programs whose tests took `least` seconds or more, the slowest first.
    pub fn slow(&self, least: f64) -> Vec<(&str, f64)> {
        let mut slow: Vec<_> = self.seconds.iter().filter(|(_, took)| *took >= least).collect();
        slow.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        slow.into_iter().map(|(program, took)| (program.as_str(), *took)).collect()
    }

    /// Returns the names of the tests that failed, and the skips that were refused.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    fn skips_refused(&self) -> u64 {
        self.failures.iter().filter(|failure| failure.starts_with("SKIP ")).count() as u64
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed(), self.failed(), self.skipped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 4 tests
test ring::tests::r7_reader_waits ... ok
test r7_canary_weak_store - should panic ... ok
test slow ... ignored, takes an hour
test wrong ... FAILED
SKIP r7_reader_waits (needs userns): off here

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.12s

test crates/core/ring/src/lib.rs - (line 3) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    fn read(required: &str) -> Tally {
        let mut tally = Tally::new(Required::parse(required));
        OUTPUT.lines().for_each(|line| tally.line(line));
        tally
    }

    #[test]
    fn totals_of_all_binaries_are_added() {
        let tally = read("");
        assert_eq!(tally.to_string(), "2 passed, 1 failed, 2 skipped");
        assert_eq!(tally.failures(), ["wrong"]);
        assert_eq!(tally.canaries(), 1);
    }

    #[test]
    fn canary_test_that_skipped_itself_proves_nothing() {
        let tally = read("");
        assert_eq!(tally.skips(), ["r7_reader_waits"]);
        assert!(tally.proofs().all(|name| !name.contains("r7_reader_waits")));
        assert!(tally.proofs().any(|name| name.starts_with("r7_canary_weak_store")));
    }

    #[test]
    fn canary_skip_for_want_of_what_is_required_fails() {
        let tally = read("userns");
        assert_eq!(tally.to_string(), "2 passed, 2 failed, 1 skipped");
        assert_eq!(tally.failures()[1], "SKIP r7_reader_waits (needs userns): off here");
    }

    fn tally(output: &str) -> Tally {
        let mut tally = Tally::default();
        output.lines().for_each(|line| tally.line(line));
        tally
    }

    #[test]
    fn test_that_passes_when_it_runs_once_more_has_passed_and_is_named() {
        let mut tally = read("");
        assert_eq!(tally.repeatable().unwrap(), ["wrong"]);
        assert!(tally.repeat(&self::tally("test wrong ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n")));
        assert_eq!(tally.to_string(), "3 passed, 0 failed, 2 skipped");
        assert_eq!((tally.repeated(), tally.failures()), (&["wrong".to_owned()][..], &[][..]));
        assert!(tally.proofs().any(|name| name == "wrong"));
    }

    #[test]
    fn canary_test_that_fails_twice_or_does_not_run_again_has_failed() {
        for again in ["test wrong ... FAILED\ntest result: FAILED. 0 passed; 1 failed\n", "", "test other ... ok\n"] {
            let mut tally = read("");
            assert!(!tally.repeat(&self::tally(again)), "{again}");
            assert_eq!(tally.to_string(), "2 passed, 1 failed, 2 skipped");
        }
        let skipped = tally("SKIP wrong (needs root): no\ntest wrong ... ok\n");
        assert!(!read("").repeat(&skipped));
        // A missing requirement, a failure without a name, a crash, and many failures are not matters of chance.
        assert_eq!(read("userns").repeatable(), None);
        assert_eq!(tally("test result: FAILED. 0 passed; 1 failed\n").repeatable(), None);
        let crashed = "running 1 test\ntest a ... FAILED\ntest result: FAILED. 0 passed; 1 failed\nrunning 2 tests\n";
        assert_eq!(tally(crashed).repeatable(), None);
        let many = "test a ... FAILED\n".repeat(4) + "test result: FAILED. 0 passed; 4 failed\n";
        assert_eq!(tally(&many).repeatable(), None);
    }

    #[test]
    fn slow_programs_are_named_with_the_slowest_first() {
        let ended = |took| format!("test result: ok. 1 passed; 0 failed; finished in {took}s\n");
        let running = |program| format!("     Running tests/{program}.rs (target/debug/deps/{program}-1f)\n");
        let output = [running("a"), ended(20.5), running("b"), ended(0.01), running("c"), ended(31.)].concat();
        assert_eq!(tally(&output).slow(20.0), [("tests/c.rs", 31.0), ("tests/a.rs", 20.5)]);
    }

    #[test]
    fn skipped_tier_counts_once() {
        assert_eq!(Tally::of_skipped_tier(false).to_string(), "0 passed, 0 failed, 1 skipped");
        assert_eq!(Tally::of_skipped_tier(true).to_string(), "0 passed, 1 failed, 0 skipped");
    }
}
