// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs cases one after the other and prints what libtest would print.

use crate::error::{Error, Result};
use std::io::Write;
use std::time::Instant;

/// Result of a case that did not fail.
pub enum Verdict {
    /// The case passed.
    Done,
    /// The case could not run here.
    Skip {
        /// What is missing, as `TOMBOLO_REQUIRE` names it.
        need: &'static str,
        /// The reason.
        why: String,
    },
}

/// The host half of a case.
pub struct Case<R> {
    /// Name of the case, in the form of a test's name.
    pub name: &'static str,
    /// What the case does with the machines.
    pub run: fn(&mut R) -> Result<Verdict>,
}

/// A guest half: its name, and its function, which gets the arguments.
pub type Half = (&'static str, fn(&[String]) -> Result<()>);

/// Reason why there is no rig.
pub enum Lacking {
    /// The machine lacks something that is needed: cases are skipped.
    Need(String),
    /// The project is at fault: cases fail.
    Fault(Error),
}

/// The machines that cases share.
pub trait Rig: Sized + 'static {
    /// Requirement that skipped cases name.
    const NEED: &'static str;

    /// Gets the parts of machines; no machine has to boot yet.
    ///
    /// # Errors
    /// [`Lacking`].
    fn prepare() -> std::result::Result<Self, Lacking>;

    /// Runs one case. A machine that the case leaves broken is not used again.
    ///
    /// # Errors
    /// The case fails, or a machine shows a fault.
    fn run(&mut self, case: &Case<Self>) -> Result<Verdict>;

    /// Ends all machines that still run.
    ///
    /// # Errors
    /// A machine shows a fault.
    fn finish(self) -> Result<()>;
}

/// Runs the cases whose names contain one of `words`, or all cases if there are no words.
///
/// # Errors
/// The number of cases that failed, or a message that no case has such a name.
pub fn run<R: Rig>(all: impl Iterator<Item = &'static Case<R>>, words: &[&str]) -> Result<()> {
    let wanted = |case: &&Case<R>| words.is_empty() || words.iter().any(|word| case.name.contains(word));
    let chosen: Vec<&Case<R>> = all.filter(wanted).collect();
    if chosen.is_empty() {
        return Err(Error::new(format!("no case has a name with one of {words:?}")));
    }
    println!("\nrunning {} tests", chosen.len());
    let mut rig = R::prepare();
    let mut failures = Vec::new();
    for case in &chosen {
        let start = Instant::now();
        let verdict = match &mut rig {
            Ok(rig) => rig.run(case),
            Err(Lacking::Need(why)) => Ok(Verdict::Skip { need: R::NEED, why: why.clone() }),
            Err(Lacking::Fault(why)) => Err(why.clone()),
        };
        let took = start.elapsed().as_secs_f64();
        let end = match verdict {
            Ok(Verdict::Done) => "ok",
            Ok(Verdict::Skip { need, why }) => {
                writeln!(std::io::stderr(), "SKIP {} (needs {need}): {}", case.name, why.replace('\n', " "))?;
                "ok"
            }
            Err(why) => {
                failures.push((case.name, why));
                "FAILED"
            }
        };
        println!("test {} ... {end} <{took:.1}s>", case.name);
    }
    if let Err(why) = rig.map_or(Ok(()), Rig::finish) {
        failures.push(("the_end", why));
        println!("test the_end ... FAILED");
    }
    for (name, why) in &failures {
        println!("\n---- {name} ----\n{why}");
    }
    let (word, failed) = (if failures.is_empty() { "ok" } else { "FAILED" }, failures.len());
    let passed = chosen.len().saturating_sub(failed);
    println!("\ntest result: {word}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out\n");
    if failed > 0 { Err(Error::new(format!("{failed} failed"))) } else { Ok(()) }
}
