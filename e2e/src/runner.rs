// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs cases one after the other and prints what libtest would print.

use crate::cases::{self, Case, Verdict};
use crate::rig::{Lacking, Rig};
use std::io::Write;
use std::time::Instant;
use tombolo_e2e::error::{Error, Result};

/// Runs the cases whose names contain one of `words`, all if there is none.
pub fn run(words: &[&str]) -> Result<()> {
    let wanted = |case: &&Case| words.is_empty() || words.iter().any(|word| case.name.contains(word));
    let chosen: Vec<&Case> = cases::all().filter(wanted).collect();
    if chosen.is_empty() {
        return Err(Error::new(format!("no case has a name with one of {words:?}")));
    }
    println!("\nrunning {} tests", chosen.len());
    let mut rig = Rig::prepare();
    let mut failures = Vec::new();
    for case in &chosen {
        let start = Instant::now();
        let verdict = match &mut rig {
            Ok(rig) => rig.run(case),
            Err(Lacking::Need(why)) => Ok(Verdict::Skip { need: "vm", why: why.clone() }),
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
