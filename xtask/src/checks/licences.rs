// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the licences of dependencies are compatible with this project's.

use crate::report::Report;
use crate::workspace::Workspace;
use spdx::{Expression, LicenseReq, ParseMode};

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

/// Returns whether allowed licences satisfy an SPDX expression; false if the expression cannot be read. With an
/// exception a licence is another one, and none of these is allowed so far.
fn may_use(expression: &str) -> bool {
    let is_allowed = |it: &LicenseReq| it.addition.is_none() && ALLOWED.contains(&it.license.to_string().as_str());
    Expression::parse_mode(expression, ParseMode::LAX).is_ok_and(|expression| expression.evaluate(is_allowed))
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
