// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the licences of dependencies are compatible with this project's.

use crate::report::Report;
use crate::workspace::Workspace;

/// Licences that a dependency may have. Before you add one, decide whether it binds those who ship Tombolo.
const ALLOWED: [&str; 3] = ["Apache-2.0", "MIT", "Unicode-3.0"];
/// Further licences for dependencies of xtask alone. They bind those who change the tool, not what it makes or checks.
const ALLOWED_IN_TOOLS: [&str; 1] = ["MPL-2.0"];

/// Checks that every dependency, direct or indirect, may be used under allowed licences alone.
pub fn check(workspace: &Workspace) -> Report {
    let mut report = Report::default();
    for foreign in &workspace.foreign {
        let as_tool = foreign.tool && ALLOWED_IN_TOOLS.contains(&foreign.licence.as_str());
        if !as_tool && !may_use(&foreign.licence) {
            let name = &foreign.name;
            report.fail(format!("{name}: licence `{}`, allowed are {}", foreign.licence, ALLOWED.join(", ")));
        }
    }
    report.summary = format!("{} dependencies", workspace.foreign.len());
    report
}

/// Returns whether allowed licences satisfy an SPDX expression; false if the expression cannot be read.
fn may_use(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words: Vec<&str> = spaced.split_whitespace().rev().collect();
    either(&mut words).is_some_and(|good| good && words.is_empty())
}

// Each function pops its words from the end of the list, which holds the next word. It returns none if the words make
// no sense.

fn either(words: &mut Vec<&str>) -> Option<bool> {
    let mut good = both(words)?;
    while words.pop_if(|word| *word == "OR").is_some() {
        good |= both(words)?;
    }
    Some(good)
}

fn both(words: &mut Vec<&str>) -> Option<bool> {
    let mut good = one(words)?;
    while words.pop_if(|word| *word == "AND").is_some() {
        good &= one(words)?;
    }
    Some(good)
}

fn one(words: &mut Vec<&str>) -> Option<bool> {
    match words.pop()? {
        "(" => {
            let good = either(words)?;
            (words.pop()? == ")").then_some(good)
        }
        licence => {
            let mut good = ALLOWED.contains(&licence);
            if words.pop_if(|word| *word == "WITH").is_some() {
                words.pop()?;
                good = false; // With an exception it is another licence; none of these is allowed so far.
            }
            Some(good)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Foreign;

    fn check_licence(licence: &str) -> Report {
        check_foreign(licence, false)
    }

    fn check_foreign(licence: &str, tool: bool) -> Report {
        let foreign = vec![Foreign { name: "dep".into(), licence: licence.into(), tool }];
        check(&Workspace { foreign, ..Workspace::default() })
    }

    #[test]
    fn allowed_expressions_pass() {
        for licence in [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
            "(MIT OR GPL-3.0) AND Unicode-3.0",
            "GPL-3.0 OR MIT",
        ] {
            check_licence(licence).assert_passed();
        }
    }

    #[test]
    fn canary_other_expressions_fail() {
        for licence in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT AND GPL-3.0) OR LGPL-2.1",
            "Apache-2.0 WITH LLVM-exception",
            "",
            "(MIT",
            "MIT MIT",
            "MIT OR",
        ] {
            check_licence(licence).assert_only_failure("dep: licence");
        }
    }

    #[test]
    fn tool_under_a_licence_for_tools_passes() {
        check_foreign("MPL-2.0", true).assert_passed();
    }

    #[test]
    fn canary_licence_for_tools_in_what_ships_fails() {
        check_foreign("MPL-2.0", false).assert_only_failure("dep: licence");
        check_foreign("GPL-3.0", true).assert_only_failure("dep: licence");
    }
}
