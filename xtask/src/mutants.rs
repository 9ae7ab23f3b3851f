// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes single expressions of the most important files and checks that some test fails for each change
//! (cargo-mutants).
//!
//! `tools/mutants/files` lists the files, which of their functions count, and the tests to run. For each file
//! `tools/mutants/baseline` records the content that was tried, the number of mutants, which of them no test kills, and
//! why that is right. A file that has not changed since it was tried is not tried again. A file that was never tried is
//! reported until its result is recorded.

mod baseline;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use baseline::{Baseline, name_of};

use crate::workspace::Workspace;

const FILES: &str = "tools/mutants/files";
const BASELINE: &str = "tools/mutants/baseline";
const CANARY: &str = "tools/mutants/canary";
/// Minutes during which the run begins further files, unless `TOMBOLO_MUTANTS_MINUTES` is set. The run reports the
/// files that are left.
const MINUTES: u64 = 90;

/// A line of the list: files of one crate, and the tests that must kill their mutants.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Subject {
    /// Path of a file, or of a folder with all files in it.
    path: String,
    /// Functions that count. If the list is empty, all do.
    functions: Vec<String>,
    /// Arguments of `cargo test` besides the package that the file belongs to.
    tests: Vec<String>,
}

fn parse_subjects(text: &str) -> Result<Vec<Subject>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    let subjects: Vec<Subject> = lines
        .map(|line| {
            let (what, tests) = line.split_once(": ").ok_or(format!("{FILES}: no tests are named in `{line}`"))?;
            let (path, functions) = what.split_once(" in ").unwrap_or((what, ""));
            Ok(Subject { path: path.trim().to_owned(), functions: words(functions), tests: words(tests) })
        })
        .collect::<Result<_, String>>()?;
    if subjects.is_empty() { Err(format!("{FILES} names no file")) } else { Ok(subjects) }
}

/// Returns the Rust files of a subject, without its tests, in order.
fn files_of(root: &Path, subject: &Subject) -> Result<Vec<String>, String> {
    let mut open = vec![root.join(&subject.path)];
    let mut files = Vec::new();
    while let Some(at) = open.pop() {
        if at.is_dir() {
            let entries = fs::read_dir(&at).map_err(|error| format!("{}: {error}", at.display()))?;
            open.extend(entries.flatten().map(|entry| entry.path()));
        } else if at.extension().is_some_and(|ext| ext == "rs") {
            files.push(at.strip_prefix(root).expect("below the root").display().to_string());
        } else if !at.exists() {
            return Err(format!("{FILES}: there is no {}", subject.path));
        }
    }
    files.sort();
    if files.is_empty() { Err(format!("{FILES}: no Rust file in {}", subject.path)) } else { Ok(files) }
}

/// Returns the hash that git computes of a file's content.
fn form_of(root: &Path, file: &str) -> Result<String, String> {
    let output = Command::new("git").args(["hash-object", file]).current_dir(root).output();
    let output = output.map_err(|error| format!("cannot run git: {error}"))?;
    let form = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if form.len() >= 40 { Ok(form) } else { Err(format!("git knows no form of {file}")) }
}

/// Result of the mutants of one file.
#[derive(Debug, Default)]
struct Tried {
    caught: usize,
    /// Mutants that no test killed, without their positions in the file.
    survived: Vec<String>,
}

impl Tried {
    fn count(&self) -> usize {
        self.caught + self.survived.len()
    }
}

/// Returns the pattern that `cargo mutants` matches with mutants' names. It fits those of `file`, or only those of
/// `functions` if any are named.
fn names_of(file: &str, functions: &[String]) -> String {
    let file = file.replace('.', r"\.");
    if functions.is_empty() {
        return format!("^{file}:");
    }
    format!(r"^{file}:.*(replace|in) ([^ ]+::|<[^>]*>::)?({})( ->| with|$)", functions.join("|"))
}

/// Tries the mutants of `files` that their subjects name, with the tests of the crates that they belong to.
fn try_files(
    folder: &Path,
    out: &Path,
    files: &[(String, Subject)],
    tests: &[String],
) -> Result<BTreeMap<String, Tried>, String> {
    let _ = fs::remove_dir_all(out);
    fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let mut command = Command::new("cargo");
    command.args(["mutants", "--jobs", "1", "--colors", "never", "--minimum-test-timeout", "20", "--dir"]);
    command.arg(folder).arg("--output").arg(out);
    for (file, subject) in files {
        command.args(["--file", file, "--re", &names_of(file, &subject.functions)]);
    }
    command.arg("--").args(tests);
    // A mutant is built once and runs for a second, so that the time to build it matters most.
    for (name, value) in [("TEST_OPT_LEVEL", "0"), ("TEST_DEBUG", "0"), ("DEV_DEBUG", "0")] {
        command.env(format!("CARGO_PROFILE_{name}"), value);
    }
    command.env("CARGO_INCREMENTAL", "1").env("CARGO_TARGET_DIR", out.with_extension("target"));
    // The exit code only reports that mutants survived; this program compares them with the baseline instead.
    let status = command.status().map_err(|error| format!("cannot run cargo mutants: {error}"))?;
    // 2: some mutants survived; 3: some did not end, which counts as caught.
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        return Err(format!("cargo mutants ended with {status} and tried nothing"));
    }
    let read = |name: &str| fs::read_to_string(out.join("mutants.out").join(name)).unwrap_or_default();
    Ok(sort(files.iter().map(|(file, _)| file), &(read("caught.txt") + &read("timeout.txt")), &read("missed.txt")))
}

/// Returns the result of the mutants of each file, also of a file that has none.
fn sort<'a>(files: impl Iterator<Item = &'a String>, caught: &str, missed: &str) -> BTreeMap<String, Tried> {
    let mut tried: BTreeMap<String, Tried> = files.map(|file| (file.clone(), Tried::default())).collect();
    let file_of = |line: &str| line.split(':').next().unwrap_or_default().to_owned();
    caught.lines().for_each(|line| tried.entry(file_of(line)).or_default().caught += 1);
    missed.lines().for_each(|line| tried.entry(file_of(line)).or_default().survived.push(name_of(line)));
    tried
}

/// Tries a crate with one function that a test covers and one that no test covers. Returns whether at least one mutant
/// is caught, at least one survives, and a name that no function has yields no mutant.
fn try_canary(root: &Path, out: &Path) -> Result<bool, String> {
    let file = "src/lib.rs".to_owned();
    let try_function = |functions: &[&str]| -> Result<Tried, String> {
        let functions = functions.iter().map(|name| (*name).to_owned()).collect();
        let subject = Subject { path: file.clone(), functions, tests: Vec::new() };
        let mut tried = try_files(&root.join(CANARY), out, &[(file.clone(), subject)], &[])?;
        Ok(tried.remove(&file).unwrap_or_default())
    };
    let (all, nothing) = (try_function(&[])?, try_function(&["no_such_function"])?);
    let found = all.caught > 0 && all.survived.iter().all(|name| name.contains("nobody_tests"));
    Ok(found && !all.survived.is_empty() && nothing.count() == 0)
}

fn report(name: &str, passed: bool) -> bool {
    println!("test mutants_{name} ... {}", if passed { "ok" } else { "FAILED" });
    println!("test result: {}", if passed { "ok. 1 passed; 0 failed;" } else { "FAILED. 0 passed; 1 failed;" });
    passed
}

/// Tries the files that have changed since they were recorded, or the files that `args` name. `--record` records the
/// results.
pub fn run(args: &[&str]) -> Result<bool, String> {
    let root = Workspace::load()?.root;
    let text = |file: &str| fs::read_to_string(root.join(file)).map_err(|error| format!("{file}: {error}"));
    let subjects = parse_subjects(&text(FILES)?)?;
    let mut baseline = Baseline::parse(&text(BASELINE)?)?;
    let named: Vec<&str> = args.iter().copied().filter(|arg| *arg != "--record").collect();
    let record = args.contains(&"--record");
    let out = root.join("target/mutants");

    let mut all_passed = report("canary", try_canary(&root, &out)?);
    let minutes = std::env::var("TOMBOLO_MUTANTS_MINUTES").ok().and_then(|text| text.parse().ok());
    let until = Instant::now() + Duration::from_secs(60 * minutes.unwrap_or(MINUTES));
    let (mut tried, mut left) = (0, Vec::new());
    for (tests, files) in in_runs(choose(&root, &subjects, &baseline, &named)?) {
        if Instant::now() >= until {
            left.extend(files.into_iter().map(|(file, _)| file));
            continue;
        }
        for (file, result) in try_files(&root, &out, &files, &tests)? {
            tried += result.count();
            println!("\n{file}: {} caught, {} survived", result.caught, result.survived.len());
            all_passed &= report(&file, judge(&baseline, &file, &result));
            if record {
                baseline.set(&file, &form_of(&root, &file)?, result.count(), &result.survived);
                fs::write(root.join(BASELINE), baseline.to_string()).map_err(|error| format!("{BASELINE}: {error}"))?;
            }
        }
    }
    for file in &left {
        eprintln!("SKIP mutants_{file} (needs time): TOMBOLO_MUTANTS_MINUTES gives more");
    }
    if tried == 0 {
        eprintln!("not one mutant was tried");
    }
    Ok(all_passed && tried > 0)
}

/// Returns whether the baseline allows the result of a file, and prints the differences.
fn judge(baseline: &Baseline, file: &str, tried: &Tried) -> bool {
    if tried.count() == 0 {
        eprintln!("{file}: not one mutant was tried: {FILES} names functions that are not there");
    }
    for name in baseline.gone(file, &tried.survived) {
        eprintln!("{BASELINE}: {file}: `{name}` is there no more, or a test kills it: take it out");
    }
    let unknown = baseline.unknown(file, &tried.survived);
    unknown.iter().for_each(|name| eprintln!("no test kills: {file}: {name}"));
    tried.count() > 0 && unknown.is_empty()
}

/// Groups the files by their tests: files with the same tests are tried in one run.
fn in_runs(chosen: Vec<(String, Subject)>) -> BTreeMap<Vec<String>, Vec<(String, Subject)>> {
    let mut runs = BTreeMap::<_, Vec<_>>::new();
    for (file, subject) in chosen {
        runs.entry(subject.tests.clone()).or_default().push((file, subject));
    }
    runs
}

/// Returns the files to try: those that were named, otherwise those that have changed, and at least one file.
fn choose(
    root: &Path,
    subjects: &[Subject],
    baseline: &Baseline,
    named: &[&str],
) -> Result<Vec<(String, Subject)>, String> {
    let mut all = BTreeMap::new();
    for subject in subjects {
        // A later line is more specific and replaces an earlier one.
        all.extend(files_of(root, subject)?.into_iter().map(|file| (file, subject.clone())));
    }
    if let Some(unknown) = named.iter().find(|name| !all.contains_key(**name)) {
        return Err(format!("{unknown} is not in {FILES}"));
    }
    let mut chosen = Vec::new();
    for (file, subject) in &all {
        let wanted = match (named.is_empty(), baseline.form(file)) {
            (true, None) => {
                eprintln!("SKIP mutants_{file} (needs baseline): `cargo xtask mutants --record {file}` begins one");
                false
            }
            (true, Some(form)) => *form != form_of(root, file)?,
            (false, _) => named.contains(&file.as_str()),
        };
        if wanted {
            chosen.push((file.clone(), subject.clone()));
        }
    }
    if chosen.is_empty() {
        let size = |file: &&String| fs::metadata(PathBuf::from(root).join(file)).map_or(0, |found| found.len());
        let smallest = all.keys().filter(|file| baseline.form(file).is_some()).min_by_key(size);
        chosen.extend(smallest.map(|file| (file.clone(), all[file].clone())));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn list_names_paths_functions_and_tests() {
        let subjects = parse_subjects("# why\n\ncrates/a/src: --lib\ncrates/b.rs in f g: --lib --test h\n").unwrap();
        let subject = |path: &str, functions, tests| Subject {
            path: path.into(),
            functions: words(functions),
            tests: words(tests),
        };
        assert_eq!(subjects, [subject("crates/a/src", "", "--lib"), subject("crates/b.rs", "f g", "--lib --test h")]);
    }

    #[test]
    fn function_is_matched_as_a_whole_and_in_its_file_only() {
        let pattern = names_of("crates/a/src/b.rs", &words("f g"));
        assert_eq!(pattern, r"^crates/a/src/b\.rs:.*(replace|in) ([^ ]+::|<[^>]*>::)?(f|g)( ->| with|$)");
        assert_eq!(names_of("crates/a/src/b.rs", &[]), r"^crates/a/src/b\.rs:");
    }

    #[test]
    fn canary_list_without_files_or_tests_is_refused() {
        assert!(parse_subjects("# nothing\n").is_err());
        assert!(parse_subjects("crates/a/src\n").is_err());
        let gone = Subject { path: "crates/no-such-crate".into(), functions: Vec::new(), tests: Vec::new() };
        assert!(files_of(Path::new("/"), &gone).is_err());
    }

    #[test]
    fn canary_file_of_which_no_mutant_was_tried_fails() {
        let baseline = Baseline::parse("file a.rs 0123 3\n  1 replace f with ()\n    a hint\n").unwrap();
        let files = words("a.rs b.rs");
        let tried = sort(files.iter(), "a.rs:1:2: replace g with ()\n", "a.rs:3:4: replace f with ()\n");
        assert!(judge(&baseline, "a.rs", &tried["a.rs"]));
        assert_eq!((tried["a.rs"].caught, tried["a.rs"].count()), (1, 2));
        assert!(!judge(&baseline, "b.rs", &tried["b.rs"]), "nothing was tried");
        let tried = sort(files.iter(), "", "a.rs:3:4: replace f with ()\nb.rs:3:4: replace f with ()\n");
        assert!(!judge(&baseline, "b.rs", &tried["b.rs"]), "one survived that the baseline does not have");
    }

    #[test]
    fn files_with_the_same_tests_are_tried_in_one_run() {
        let subjects = parse_subjects("a.rs: --lib\nb.rs: --lib --tests\nc.rs: --lib\n").unwrap();
        let runs = in_runs(subjects.into_iter().map(|subject| (subject.path.clone(), subject)).collect());
        let files: Vec<Vec<_>> = runs.values().map(|run| run.iter().map(|(file, _)| file.as_str()).collect()).collect();
        assert_eq!(files, [vec!["a.rs", "c.rs"], vec!["b.rs"]]);
    }

    /// The committed list and baseline can be read, each file of the list exists with its functions, and the list has a
    /// file of each crate.
    #[test]
    fn committed_list_and_baseline_fit_the_tree() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let text = |file: &str| fs::read_to_string(root.join(file)).unwrap();
        let subjects = parse_subjects(&text(FILES)).unwrap();
        let files: Vec<_> = subjects.iter().flat_map(|subject| files_of(root, subject).unwrap()).collect();
        for subject in &subjects {
            let code: String = files_of(root, subject).unwrap().iter().map(|file| text(file)).collect();
            let is_gone = |name: &&String| !['(', '<'].iter().any(|next| code.contains(&format!("fn {name}{next}")));
            let gone: Vec<_> = subject.functions.iter().filter(is_gone).collect();
            assert!(gone.is_empty(), "{FILES}: {} has no {gone:?}", subject.path);
        }
        let baseline = Baseline::parse(&text(BASELINE)).unwrap();
        for file in baseline.files() {
            assert!(files.contains(file), "{BASELINE} has {file}, {FILES} has not");
        }
        for name in ["layout", "mem", "ring", "channel", "sockets", "control", "broker"] {
            assert!(files.iter().any(|file| file.contains(&format!("/{name}/src/"))), "{FILES} has no file of {name}");
        }
    }
}
