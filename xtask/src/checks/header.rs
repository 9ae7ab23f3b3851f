// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the C header equals the output of its generator for the crate `capi`.

use crate::report::Report;
use crate::tree::Tree;
use std::fs;
use std::path::Path;

/// Header that C programs include.
const HEADER: &str = "include/tombolo.h";
const SOURCES: &str = "crates/capi/src/";
const CONFIG: &str = "crates/capi/cbindgen.toml";
/// Modules in an order that suits C programmers.
const MODULES: [&str; 10] =
    ["border", "options", "half", "halves", "channel", "stream", "messages", "listener", "structs", "pointers"];
const REMEDY: &str = "`cargo xtask header --write` makes it anew";

/// Checks that the committed header is the generated one, character for character.
pub fn check(root: &Path, tree: &Tree) -> Report {
    let mut report = compare(tree.text(HEADER), generate(root));
    for module in forgotten(tree) {
        report.fail(format!("{SOURCES}{module}.rs is not in the header: add it to MODULES in {}", file!()));
    }
    report
}

/// Writes the header.
pub fn write(root: &Path) -> Result<(), String> {
    let header = generate(root)?;
    fs::write(root.join(HEADER), header).map_err(|e| format!("cannot write {HEADER}: {e}"))
}

fn compare(committed: Option<&str>, generated: Result<String, String>) -> Report {
    let mut report = Report::default();
    match (committed, generated) {
        (_, Err(why)) => report.fail(why),
        (None, _) => report.fail(format!("{HEADER} is missing: {REMEDY}")),
        (Some(committed), Ok(generated)) => {
            report.summary = format!("{HEADER}, {} lines", generated.lines().count());
            if committed != generated {
                let same = committed.lines().zip(generated.lines()).take_while(|(a, b)| a == b).count();
                report.fail(format!("{HEADER}:{}: not what {SOURCES} says: {REMEDY}", same + 1));
            }
        }
    }
    report
}

/// Returns the modules of the crate that the generator does not read.
fn forgotten(tree: &Tree) -> impl Iterator<Item = &str> {
    let modules = tree.files(&[".rs"]).filter_map(|(path, _)| path.strip_prefix(SOURCES)?.strip_suffix(".rs"));
    modules.filter(|module| *module != "lib" && !MODULES.contains(module))
}

fn generate(root: &Path) -> Result<String, String> {
    let config = cbindgen::Config::from_file(root.join(CONFIG)).map_err(|e| format!("{CONFIG}: {e}"))?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for module in MODULES {
        builder = builder.with_src(root.join(SOURCES).join(module).with_extension("rs"));
    }
    let mut header = Vec::new();
    builder.generate().map_err(|e| format!("{SOURCES}: {e}"))?.write(&mut header);
    Ok(unfold(&String::from_utf8_lossy(&header)))
}

/// Replaces the typedefs that cbindgen makes for the types of `pointers.rs` by the pointers that they stand for. A C
/// programmer should see the pointer.
fn unfold(header: &str) -> String {
    let mut blocks: Vec<String> = header.split("\n\n").map(str::to_owned).collect();
    while let Some(at) = blocks.iter().position(|block| pointer_typedef(block).is_some()) {
        let block = blocks.remove(at);
        let Some((target, name)) = pointer_typedef(&block) else { break };
        for block in &mut blocks {
            *block = block.split('\n').map(|line| substitute(line, name, target)).collect::<Vec<_>>().join("\n");
        }
    }
    blocks.join("\n\n")
}

/// Returns target and name of `typedef TARGET *NAME;`, the last line of its block.
fn pointer_typedef(block: &str) -> Option<(&str, &str)> {
    let line = block.lines().last()?.strip_prefix("typedef ")?.strip_suffix(';')?;
    Some(line.split_at(line.rfind('*')? + 1))
}

/// Replaces the type `name` by `target`, which ends with `*`, in a line of code.
fn substitute(line: &str, name: &str, target: &str) -> String {
    if line.trim_start().starts_with('*') {
        return line.to_owned(); // A comment.
    }
    let mut done = String::new();
    let mut rest = line;
    while let Some(at) = rest.find(&format!("{name} ")) {
        let (before, found) = rest.split_at(at);
        let whole = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let skipped = name.len() + usize::from(whole);
        done = done + before + if whole { target } else { name };
        rest = &found[skipped..];
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    #[test]
    fn header_carries_doc_comments_and_shows_pointers() {
        let header = generate(root()).unwrap();
        assert!(header.contains("const char *tombolo_last_error(void);"), "{header}");
        assert!(header.contains(" * Returns the error of this thread's last failed call"), "{header}");
        assert!(
            header
                .contains("(struct tombolo_listener *listener, int64_t timeout_ns, struct tombolo_channel **channel);")
        );
        for line in header.lines().filter(|line| !line.trim_start().starts_with('*')) {
            assert!(!line.contains("Handle") && !line.contains("Out_"), "{line}");
        }
    }

    #[test]
    fn same_header_passes() {
        compare(Some("int f(void);\n"), Ok("int f(void);\n".into())).assert_passed();
    }

    #[test]
    fn canary_header_that_differs_in_a_comment_fails() {
        let report = compare(Some("/** Reads. */\nint f(void);\n"), Ok("/** Writes. */\nint f(void);\n".into()));
        report.assert_only_failure("include/tombolo.h:1: not what crates/capi/src/ says");
        compare(Some("int f(void);"), Ok("int f(void);\nint g(void);".into())).assert_only_failure(":2: not what");
    }

    #[test]
    fn canary_missing_header_fails() {
        compare(None, Ok("int f(void);".into())).assert_only_failure("is missing");
    }

    #[test]
    fn canary_source_that_cannot_be_read_fails() {
        compare(Some(""), generate(Path::new("/nowhere"))).assert_only_failure("cbindgen.toml");
    }

    #[test]
    fn canary_module_that_is_not_shown_fails() {
        let tree = Tree::of(&[("crates/capi/src/lib.rs", ""), ("crates/capi/src/fresh.rs", "")]);
        assert_eq!(forgotten(&tree).collect::<Vec<_>>(), ["fresh"]);
    }
}
