// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the tiers of the table, each under its own time limit, and adds up the results of their tests.

mod kin;
mod need;
mod runner;
mod table;
mod tally;

use crate::checks::{Clause, known_clauses, proven_by};
use crate::tree::Tree;
use crate::workspace::Workspace;
use need::Required;
use runner::End;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use table::{Gate, Runs, TIERS, Tier};
use tally::Tally;

/// Returns the table of tiers as text for people.
pub fn describe() -> String {
    let mut out = String::new();
    for tier in TIERS {
        let env: String = tier.env.iter().map(|(key, value)| format!("{key}='{value}' ")).collect();
        let when = match tier.runs {
            Runs::Always => "",
            Runs::Long => " (long)",
            Runs::Asked => " (when named)",
        };
        _ = writeln!(out, "{:12} {:2} min{when}: {}", tier.name, tier.limit, tier.assumes);
        _ = writeln!(out, "{:12} {env}{}", "", tier.command);
    }
    out
}

/// Largest duration of a whole run in the short form, builds included. It exceeds the time on a slow machine by a
/// tenth. On one that is slower still, or if tests hang, the run ends with a table that names the tiers not begun,
/// before those who wait for it give up.
const WHOLE_RUN: Duration = Duration::from_secs(87 * 60);

/// Seconds from which on the table at the end names a program whose tests took so long. Such programs are the first to
/// examine when a run gets too long.
const SLOW: f64 = 20.0;

/// Runs the tiers that `args` name, or all if it names none. Returns whether all passed.
pub fn run(args: &[&str]) -> Result<bool, String> {
    let named: Vec<&str> = args.iter().copied().filter(|arg| *arg != "--long").collect();
    if let Some(unknown) = named.iter().find(|name| !TIERS.iter().any(|tier| tier.name == **name)) {
        let known: Vec<&str> = TIERS.iter().map(|tier| tier.name).collect();
        return Err(format!("no tier `{unknown}`; there are: {}", known.join(", ")));
    }
    let long = args.contains(&"--long") || std::env::var("TOMBOLO_LONG").is_ok_and(|v| !v.is_empty() && v != "0");
    let required = Required::from_env();
    let root = Workspace::load()?.root;
    kin::adopt().map_err(|e| format!("cannot adopt orphans of the tests: {e}"))?;
    let wanted = |tier: &&Tier| match named.is_empty() {
        true => tier.runs == Runs::Always || (long && tier.runs == Runs::Long),
        false => named.contains(&tier.name),
    };
    let end = (named.is_empty() && !long).then(|| Instant::now() + WHOLE_RUN);
    let mut rows: Vec<Row> = Vec::new();
    for tier in TIERS.iter().filter(wanted) {
        println!("\n==> {}: {}", tier.name, tier.command);
        let limit = limit_of(tier, long, end.map(|end| end.saturating_duration_since(Instant::now())));
        rows.push(run_tier(tier, long, limit, &required, &root)?);
    }
    if named.is_empty() {
        rows.push(clauses_row(&root, &rows)?);
    }
    let (text, all_passed) = summary(&rows);
    print!("\n{text}");
    Ok(all_passed)
}

enum Verdict {
    Passed,
    Failed(String),
    Skipped(String),
}

/// Result of one tier.
struct Row {
    name: &'static str,
    verdict: Verdict,
    took: Duration,
    tally: Tally,
}

/// Returns the time that a tier may take: its own limit, but no more than is left of the whole run.
fn limit_of(tier: &Tier, long: bool, left: Option<Duration>) -> Duration {
    let own = Duration::from_secs(60 * tier.long.filter(|_| long).unwrap_or(tier.limit));
    left.map_or(own, |left| own.min(left))
}

fn run_tier(tier: &Tier, long: bool, limit: Duration, required: &Required, root: &Path) -> Result<Row, String> {
    let start = Instant::now();
    if limit.is_zero() {
        let why = format!("not begun: the whole run took {} minutes", WHOLE_RUN.as_secs() / 60);
        return Ok(Row {
            name: tier.name,
            verdict: Verdict::Failed(why),
            took: Duration::ZERO,
            tally: Tally::default(),
        });
    }
    if let Some((need, why)) = tier.needs.and_then(|need| Some((need.name(), need.missing()?))) {
        println!("SKIP {} (needs {need}): {why}", tier.name);
        let refused = required.contains(need);
        let tally = Tally::of_skipped_tier(refused);
        let verdict = match refused {
            true => Verdict::Failed(format!("TOMBOLO_REQUIRE names {need}: {why}")),
            false => Verdict::Skipped(why),
        };
        return Ok(Row { name: tier.name, verdict, took: start.elapsed(), tally });
    }
    let long = tier.long.filter(|_| long);
    let run = |words: &[&str], tally: &mut Tally| {
        let mut all = tier.command.split_whitespace().chain(words.iter().copied());
        let mut command = Command::new(all.next().unwrap_or("cargo"));
        command.args(all).envs(tier.env.iter().copied()).current_dir(root).env_remove("TOMBOLO_LONG");
        if long.is_some() {
            command.env("TOMBOLO_LONG", "1");
        }
        runner::run(&mut command, limit, |line| tally.line(line))
            .map_err(|e| format!("{}: cannot run `{}`: {e}", tier.name, tier.command))
    };
    let mut tally = Tally::new(required.clone());
    let mut ran = run(&[], &mut tally)?;
    if let (Some(between), Some(names), End::Exited(_)) = (tier.again, tally.repeatable(), &ran.end) {
        println!("\n==> {}, once more: {}", tier.name, names.join(", "));
        let words: Vec<&str> = between.split_whitespace().chain(names).collect();
        let mut again = Tally::new(required.clone());
        let ran_again = run(&words, &mut again)?;
        if tally.repeat(&again) {
            ran.end = ran_again.end;
            ran.strays.extend(ran_again.strays);
        }
    }
    let verdict = judge(tier.gate, &ran, limit, &tally);
    Ok(Row { name: tier.name, verdict, took: start.elapsed(), tally })
}

/// Returns the verdict on a tier. It passes if its command succeeds, leaves no process behind, and ran the tests that
/// it is there to run.
fn judge(gate: Gate, ran: &runner::Ran, limit: Duration, tally: &Tally) -> Verdict {
    let wrong = match &ran.end {
        End::TimedOut => format!("still running after {} s: killed", limit.as_secs()),
        End::Exited(status) if !status.success() => match tally.failed() {
            0 => status.to_string(),
            _ => format!("failed: {}", tally.failures().join(", ")),
        },
        End::Exited(_) if tally.failed() > 0 => format!("failed: {}", tally.failures().join(", ")),
        End::Exited(_) if !ran.strays.is_empty() => {
            format!("left processes behind: {}", ran.strays.join(", "))
        }
        End::Exited(_) if gate != Gate::ExitCode && tally.total() == 0 => "ran no test".into(),
        End::Exited(_) if gate == Gate::Canaries && tally.canaries() == 0 => "ran no canary".into(),
        End::Exited(_) => return Verdict::Passed,
    };
    Verdict::Failed(wrong)
}

/// Computes the last gate of a whole run: for each clause of the specification, a test that cites it ran and passed.
/// Names in the source, which `cargo xtask clauses` reads, do not show that.
fn clauses_row(root: &Path, rows: &[Row]) -> Result<Row, String> {
    let start = Instant::now();
    let known = known_clauses(&Tree::load(root)?);
    let tallies: Vec<&Tally> = rows.iter().map(|row| &row.tally).collect();
    let verdict = clauses_proven(known, &tallies);
    Ok(Row { name: "clauses", verdict, took: start.elapsed(), tally: Tally::default() })
}

fn clauses_proven(mut open: BTreeSet<Clause>, tallies: &[&Tally]) -> Verdict {
    if open.is_empty() {
        return Verdict::Failed("spec/ holds no clause".into());
    }
    let passed: BTreeSet<Clause> = tallies.iter().flat_map(|t| t.proofs()).flat_map(proven_by).collect();
    let skipped: BTreeSet<Clause> = tallies.iter().flat_map(|t| t.skips()).flat_map(|n| proven_by(n)).collect();
    open.retain(|clause| !passed.contains(clause));
    let list = |clauses: Vec<&Clause>| clauses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let untested: Vec<&Clause> = open.difference(&skipped).collect();
    match (untested.is_empty(), open.is_empty()) {
        (false, _) => Verdict::Failed(format!("no test that passed names {}", list(untested))),
        (true, false) => Verdict::Skipped(format!("tested only by what was skipped: {}", list(open.iter().collect()))),
        (true, true) => Verdict::Passed,
    }
}

/// Returns a line for each tier, then the totals, and whether nothing failed.
fn summary(rows: &[Row]) -> (String, bool) {
    let mut out = format!("{:12} {:7} {:>8}\n", "tier", "", "seconds");
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for row in rows {
        let (word, why) = match &row.verdict {
            Verdict::Passed => ("ok", String::new()),
            Verdict::Failed(why) => ("FAILED", why.clone()),
            Verdict::Skipped(why) => ("SKIPPED", why.clone()),
        };
        let why = match row.tally.repeated() {
            [] => why,
            names => format!("{why} PASSED ONLY WHEN RUN ONCE MORE: {}", names.join(", ")).trim_start().to_owned(),
        };
        let counts = match row.tally.total() {
            0 => String::new(),
            _ => row.tally.to_string(),
        };
        let line = format!("{:12} {word:7} {:8.1}  {counts}  {why}", row.name, row.took.as_secs_f64());
        _ = writeln!(out, "{}", line.trim_end());
        passed += row.tally.passed();
        skipped += row.tally.skipped();
        // A tier that failed without a failed test (it did not compile, it hung) counts as one failure.
        failed += row.tally.failed().max(u64::from(matches!(row.verdict, Verdict::Failed(_))));
    }
    for (row, program, took) in
        rows.iter().flat_map(|row| row.tally.slow(SLOW).into_iter().map(|(p, t)| (row.name, p, t)))
    {
        _ = writeln!(out, "slow: {row:12} {took:8.1}  {program}");
    }
    _ = writeln!(out, "{passed} passed, {failed} failed, {skipped} skipped");
    (out, failed == 0)
}

#[cfg(test)]
mod tests {
    use super::runner::Ran;
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    const GOOD: &str = "test r1_a ... ok\ntest r1_canary - should panic ... ok\n\
                        test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n";

    fn tally(output: &str) -> Tally {
        let mut tally = Tally::default();
        output.lines().for_each(|line| tally.line(line));
        tally
    }

    fn exited(code: i32) -> Ran {
        Ran { end: End::Exited(ExitStatus::from_raw(code << 8)), strays: vec![] }
    }

    fn why(gate: Gate, ran: &Ran, output: &str) -> Option<String> {
        match judge(gate, ran, Duration::from_secs(9), &tally(output)) {
            Verdict::Failed(why) => Some(why),
            _ => None,
        }
    }

    #[test]
    fn good_run_passes_every_gate() {
        for gate in [Gate::ExitCode, Gate::Tests, Gate::Canaries] {
            assert_eq!(why(gate, &exited(0), GOOD), None);
        }
    }

    #[test]
    fn canary_every_way_to_fail_fails() {
        let gone = Ran { end: End::TimedOut, strays: vec![] };
        let stray = Ran { strays: vec!["sleep (7)".into()], ..exited(0) };
        let plain = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let bad = "test a ... FAILED\ntest result: FAILED. 0 passed; 1 failed; 0 ignored\n";
        let empty = "test result: ok. 0 passed; 0 failed; 0 ignored\n";
        assert_eq!(why(Gate::Tests, &gone, GOOD).unwrap(), "still running after 9 s: killed");
        assert_eq!(why(Gate::Tests, &exited(101), bad).unwrap(), "failed: a");
        assert_eq!(why(Gate::Tests, &exited(0), bad).unwrap(), "failed: a");
        assert_eq!(why(Gate::ExitCode, &exited(1), "").unwrap(), "exit status: 1");
        assert_eq!(why(Gate::Tests, &stray, GOOD).unwrap(), "left processes behind: sleep (7)");
        assert_eq!(why(Gate::Tests, &exited(0), empty).unwrap(), "ran no test");
        assert_eq!(why(Gate::Canaries, &exited(0), plain).unwrap(), "ran no canary");
    }

    #[test]
    fn summary_ends_with_the_totals() {
        let row = |name, verdict, output| Row { name, verdict, took: Duration::ZERO, tally: tally(output) };
        let rows = [
            row("format", Verdict::Passed, ""),
            row("unit", Verdict::Passed, GOOD),
            row("lint", Verdict::Failed("exit status: 1".into()), ""),
            row("asan", Verdict::Skipped("no nightly".into()), ""),
        ];
        let (text, passed) = summary(&rows);
        assert!(!passed);
        assert!(text.ends_with("\n2 passed, 1 failed, 1 skipped\n"), "{text}");
        let (text, passed) = summary(&rows[..2]);
        assert!(!text.contains("ONCE MORE"), "{text}");
        assert!(passed && text.ends_with("\n2 passed, 0 failed, 1 skipped\n"), "{text}");
    }

    fn clauses(names: &[&str]) -> BTreeSet<Clause> {
        names.iter().flat_map(|name| proven_by(name)).collect()
    }

    #[test]
    fn clause_with_a_passed_test_is_proven() {
        let tally = tally("test a::r1_x ... ok\ntest r2_y - should panic ... ok\n");
        assert!(matches!(clauses_proven(clauses(&["r1", "r2"]), &[&tally]), Verdict::Passed));
    }

    #[test]
    fn clause_with_a_skipped_test_is_skipped() {
        let tally = tally("SKIP r1_x (needs userns): off\ntest a::r1_x ... ok\n");
        assert!(matches!(clauses_proven(clauses(&["r1"]), &[&tally]), Verdict::Skipped(why) if why.ends_with(": R-1")));
    }

    #[test]
    fn canary_clause_whose_test_never_passed_fails() {
        let tally = tally("test r1_x ... FAILED\ntest r2_y ... ignored\nSKIP r2_z: off\n");
        let verdict = clauses_proven(clauses(&["r1", "r2", "r3"]), &[&tally]);
        assert!(matches!(verdict, Verdict::Failed(why) if why.ends_with("names R-1, R-3")));
        assert!(matches!(clauses_proven(BTreeSet::new(), &[&tally]), Verdict::Failed(_)));
    }

    #[test]
    fn page_about_testing_names_every_tier() {
        let page = include_str!("../../docs/testing.md");
        for tier in TIERS {
            assert!(page.contains(&format!("| `{}` |", tier.name)), "docs/testing.md lacks {}", tier.name);
        }
    }

    #[test]
    fn tier_takes_no_more_than_is_left_of_the_whole_run() {
        let tier = TIERS.iter().find(|tier| tier.name == "crash").unwrap();
        assert_eq!(limit_of(tier, false, None), Duration::from_secs(600));
        assert_eq!(limit_of(tier, true, None), Duration::from_secs(7200));
        assert_eq!(limit_of(tier, false, Some(Duration::from_secs(7))), Duration::from_secs(7));
        assert_eq!(limit_of(tier, false, Some(Duration::from_secs(7000))), Duration::from_secs(600));
    }

    #[test]
    fn canary_tier_that_has_no_time_left_fails_without_being_run() {
        let tier = TIERS.iter().find(|tier| tier.name == "xen").unwrap();
        let row = run_tier(tier, false, Duration::ZERO, &Required::from_env(), Path::new("/nowhere")).unwrap();
        assert!(matches!(&row.verdict, Verdict::Failed(why) if why.starts_with("not begun")));
        assert!(!summary(&[row]).1);
    }

    #[test]
    fn unknown_tier_is_refused() {
        assert!(run(&["unit", "no-such-tier"]).unwrap_err().contains("no tier `no-such-tier`"));
    }
}
