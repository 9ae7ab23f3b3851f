// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo doctor`: reports what works on this machine, what does not, and what remedies it.

mod facts;
mod finding;
mod findings;
mod guest;
mod host;
mod net;
mod xen;

use serde::Serialize;

use crate::{
    failure::{Failure, Result},
    output,
};

use finding::{Finding, Grade};
use findings::examine;

/// Say what works on this machine and what does not, and the command that mends it
///
/// Tries what channels need (sealed memory, doorbells, barriers, the folder of services, a whole channel with itself)
/// and looks at what limits them: descriptors, memory, CPUs, cgroups, and at network interfaces that run. In a virtual
/// machine at its devices, their driver and the broker, on their host at the broker's links and machines, in a domain
/// of Xen's at its drivers, XenStore and the grants that are left. Changes nothing and leaves nothing behind.
///
/// Exit codes: 0 if all that is needed works, whatever could be better; 1 if something that is needed does not; 2 if
/// the options make no sense.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print lines of JSON, one for each finding
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Line<'a> {
    r#type: &'static str,
    #[serde(flatten)]
    finding: &'a Finding,
}

/// Carries out the command.
pub fn run(args: &Args) -> Result<()> {
    let findings = examine(&facts::probe());
    let print = |finding: &Finding| {
        if args.json { output::json(&Line { r#type: "finding", finding }) } else { output::print(&text(finding)) }
    };
    output::unless_unread(findings.iter().try_for_each(print))?;
    verdict(&findings)
}

fn verdict(findings: &[Finding]) -> Result<()> {
    let failed: Vec<_> = findings.iter().filter(|finding| finding.grade == Grade::Failure).collect();
    if failed.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = failed.iter().map(|finding| finding.check).collect();
    Err(Failure::Outcome(format!("channels do not work here: see {}", names.join(", "))))
}

fn text(finding: &Finding) -> String {
    let grade = match finding.grade {
        Grade::Ok => "ok",
        Grade::Info => "info",
        Grade::Warning => "warning",
        Grade::Failure => "FAILURE",
    };
    let mut text = format!("{grade:8} {:11} {}", finding.check, finding.says);
    if let Some(remedy) = &finding.remedy {
        text += &format!("\n{:20} to mend it: {remedy}", "");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_failure_fails_and_warning_does_not() {
        let finding = |grade| Finding { check: "x", grade, says: "y".into(), remedy: Some("z".into()) };
        assert!(verdict(&[finding(Grade::Warning), finding(Grade::Info)]).is_ok());
        let failure = verdict(&[finding(Grade::Ok), finding(Grade::Failure)]).unwrap_err();
        assert_eq!(failure.to_string(), "channels do not work here: see x");
        assert!(text(&finding(Grade::Failure)).ends_with("to mend it: z"));
    }
}
