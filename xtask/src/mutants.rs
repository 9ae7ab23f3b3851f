// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes single expressions of the files that matter most and sees that some test fails (cargo-mutants).
//!
//! `tools/mutants/files` says which files, and by which tests; `tools/mutants/baseline` says of each file in which form it was
//! tried, which mutants no test kills, and why that is right. Files that are as they were tried are not tried again; files
//! that never were are named, until somebody records them.

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
/// How long files are begun, unless `TOMBOLO_MUTANTS_MINUTES` says otherwise. Those that are left are named.
const MINUTES: u64 = 90;

/// A line of the list: files of one crate, and the tests that have to kill their mutants.
#[derive(Debug, PartialEq, Eq)]
struct Subject {
    /// A file, or a folder with all that is in it.
    path: String,
    tests: Vec<String>,
}

fn parse_subjects(text: &str) -> Result<Vec<Subject>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let subjects: Vec<Subject> = lines
        .map(|line| {
            let (path, tests) = line.split_once(':').ok_or(format!("{FILES}: no tests are named in `{line}`"))?;
            let tests = tests.split_whitespace().map(str::to_owned).collect();
            Ok(Subject { path: path.trim().to_owned(), tests })
        })
        .collect::<Result<_, String>>()?;
    if subjects.is_empty() { Err(format!("{FILES} names no file")) } else { Ok(subjects) }
}

/// The Rust files of a subject, without its tests, in order.
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

/// The form of a file: the number that git gives its content.
fn form_of(root: &Path, file: &str) -> Result<String, String> {
    let output = Command::new("git").args(["hash-object", file]).current_dir(root).output();
    let output = output.map_err(|error| format!("cannot run git: {error}"))?;
    let form = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if form.len() >= 40 { Ok(form) } else { Err(format!("git knows no form of {file}")) }
}

/// What became of the mutants of one run.
#[derive(Debug, Default)]
struct Tried {
    caught: usize,
    /// Those that no test killed, without the places where they stand.
    survived: Vec<String>,
}

/// Tries all mutants of `files` by `tests`.
fn try_files(folder: &Path, out: &Path, files: &[String], tests: &[String]) -> Result<Tried, String> {
    let _ = fs::remove_dir_all(out);
    fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let mut command = Command::new("cargo");
    command.args(["mutants", "--no-shuffle", "--colors", "never", "--minimum-test-timeout", "30", "--dir"]);
    command.arg(folder).arg("--output").arg(out);
    for file in files {
        command.args(["--file", file]);
    }
    command.arg("--").args(tests);
    // Its exit code says that mutants survived: that is looked at here, against the baseline.
    let status = command.status().map_err(|error| format!("cannot run cargo mutants: {error}"))?;
    let read = |name: &str| fs::read_to_string(out.join("mutants.out").join(name));
    let (caught, timeout, missed) = (read("caught.txt"), read("timeout.txt"), read("missed.txt"));
    match (caught, timeout, missed, status.code()) {
        // 2: some survived; 3: some did not end, which is a way to be caught.
        (Ok(caught), Ok(timeout), Ok(missed), Some(0 | 2 | 3)) => Ok(Tried {
            caught: caught.lines().count() + timeout.lines().count(),
            survived: missed.lines().map(name_of).collect(),
        }),
        _ => Err(format!("cargo mutants ended with {status} and tried nothing")),
    }
}

/// A function that a test covers and one that none does: one mutant at least is caught, and one survives.
fn try_canary(root: &Path, out: &Path) -> Result<bool, String> {
    let tried = try_files(&root.join(CANARY), out, &[], &[])?;
    let found = tried.caught > 0 && tried.survived.iter().all(|name| name.contains("nobody_tests"));
    Ok(found && !tried.survived.is_empty())
}

fn report(name: &str, passed: bool) -> bool {
    println!("test mutants_{name} ... {}", if passed { "ok" } else { "FAILED" });
    println!("test result: {}", if passed { "ok. 1 passed; 0 failed;" } else { "FAILED. 0 passed; 1 failed;" });
    passed
}

/// Tries what has changed since it was recorded, or the files that `args` name; `--record` writes down what came of it.
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
    for (file, tests) in choose(&root, &subjects, &baseline, &named)? {
        if Instant::now() >= until {
            left.push(file);
            continue;
        }
        println!("\n==> mutants of {file}");
        let result = try_files(&root, &out, std::slice::from_ref(&file), &tests)?;
        tried += result.caught + result.survived.len();
        let unknown = baseline.unknown(&file, &result.survived);
        unknown.iter().for_each(|name| eprintln!("no test kills: {file}: {name}"));
        println!("{file}: {} caught, {} survived", result.caught, result.survived.len());
        all_passed &= report(&file, unknown.is_empty());
        if record {
            baseline.set(&file, &form_of(&root, &file)?, &result.survived);
            fs::write(root.join(BASELINE), baseline.to_string()).map_err(|error| format!("{BASELINE}: {error}"))?;
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

/// What is to be tried: what was named; else what has changed, and at least one file.
fn choose(
    root: &Path,
    subjects: &[Subject],
    baseline: &Baseline,
    named: &[&str],
) -> Result<Vec<(String, Vec<String>)>, String> {
    let mut all = BTreeMap::new();
    for subject in subjects {
        // The later line is the more particular one.
        all.extend(files_of(root, subject)?.into_iter().map(|file| (file, subject.tests.clone())));
    }
    if let Some(unknown) = named.iter().find(|name| !all.contains_key(**name)) {
        return Err(format!("{unknown} is not in {FILES}"));
    }
    let mut chosen = Vec::new();
    for (file, tests) in &all {
        let wanted = match (named.is_empty(), baseline.form(file)) {
            (true, None) => {
                eprintln!("SKIP mutants_{file} (needs baseline): `cargo xtask mutants --record {file}` begins one");
                false
            }
            (true, Some(form)) => *form != form_of(root, file)?,
            (false, _) => named.contains(&file.as_str()),
        };
        if wanted {
            chosen.push((file.clone(), tests.clone()));
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

    #[test]
    fn list_names_paths_and_tests() {
        let subjects = parse_subjects("# why\n\ncrates/a/src: -p a --lib\n").unwrap();
        let tests = ["-p", "a", "--lib"].map(str::to_owned).into();
        assert_eq!(subjects, [Subject { path: "crates/a/src".into(), tests }]);
    }

    #[test]
    fn canary_list_without_files_or_tests_is_refused() {
        assert!(parse_subjects("# nothing\n").is_err());
        assert!(parse_subjects("crates/a/src\n").is_err());
        let gone = Subject { path: "crates/no-such-crate".into(), tests: Vec::new() };
        assert!(files_of(Path::new("/"), &gone).is_err());
    }

    /// What is committed can be read, and each file of the list is there.
    #[test]
    fn committed_list_and_baseline_fit_the_tree() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let text = |file: &str| fs::read_to_string(root.join(file)).unwrap();
        let subjects = parse_subjects(&text(FILES)).unwrap();
        let files: Vec<_> = subjects.iter().flat_map(|subject| files_of(root, subject).unwrap()).collect();
        let baseline = Baseline::parse(&text(BASELINE)).unwrap();
        for file in baseline.files() {
            assert!(files.contains(file), "{BASELINE} has {file}, {FILES} has not");
        }
    }
}
