// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tombolo's own programs, built as users have them, without the parts that only debuggers read.

use crate::error::{Context, Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Packages that contain the programs.
const OURS: [&str; 2] = ["tombolo-cli", "tombolo-broker"];

/// The programs by their names.
#[derive(Debug, Clone)]
pub struct Programs(BTreeMap<String, PathBuf>);

impl Programs {
    /// Builds the programs, optimised.
    ///
    /// # Errors
    /// They do not build.
    pub fn build() -> Result<Self> {
        Self::of(&cargo(&OURS, &["--bins"])?)
    }

    /// Builds an example of `package`, with the package's features for tests.
    ///
    /// # Errors
    /// It does not build.
    pub fn example(package: &str, name: &str) -> Result<Self> {
        Self::of(&cargo(&[package], &["--example", name, "--features", "testing"])?)
    }

    fn of(lines: &[Value]) -> Result<Self> {
        let built = lines.iter().filter_map(|line| line["executable"].as_str().map(PathBuf::from));
        let named = built.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), stripped(&path))));
        named.map(|(name, path)| Ok((name, path?))).collect::<Result<_>>().map(Self)
    }

    /// Builds the library of `package` that is called `name`, and returns its path. It is built beside the programs, so
    /// that their common parts are built once.
    ///
    /// # Errors
    /// The library does not build, or has another name.
    pub fn library(package: &str, name: &str) -> Result<PathBuf> {
        let lines = cargo(&[OURS[0], OURS[1], package], &["--bins", "--lib"])?;
        let files = lines.iter().filter_map(|line| line["filenames"].as_array()).flatten();
        let found = files.filter_map(Value::as_str).map(PathBuf::from).find(|path| path.ends_with(name));
        found.ok_or_else(|| Error::new(format!("{package} has no {name}")))
    }

    /// Builds a library that programs load, and returns the path of a copy without debug information.
    ///
    /// # Errors
    /// The library does not build, or has another name.
    pub fn shared(package: &str, name: &str) -> Result<PathBuf> {
        stripped(&Self::library(package, name)?)
    }

    /// Returns the path of a program.
    ///
    /// # Errors
    /// No program has that name.
    pub fn path(&self, name: &str) -> Result<&Path> {
        self.0.get(name).map(PathBuf::as_path).ok_or_else(|| Error::new(format!("no program {name} was built")))
    }
}

/// Builds `what` of `packages`. Returns cargo's messages about it.
fn cargo(packages: &[&str], what: &[&str]) -> Result<Vec<Value>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "--quiet", "--message-format=json-render-diagnostics"]).args(what);
    for package in packages {
        build.args(["-p", package]);
    }
    build.arg("--manifest-path").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml"));
    eprintln!("building {}", packages.join(", "));
    let output = build.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("no cargo")?;
    if !output.status.success() {
        return Err(Error::new(format!("{} do not build: {}", packages.join(" "), output.status)));
    }
    let said = String::from_utf8_lossy(&output.stdout);
    Ok(said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Returns a copy of a program without its debug information: a guest keeps its files in memory.
///
/// # Errors
/// The program cannot be read, or there is no `strip`.
pub fn stripped(path: &Path) -> Result<PathBuf> {
    let folder = path.with_file_name("stripped");
    fs::create_dir_all(&folder).context(folder.display())?;
    let copy = folder.join(path.file_name().unwrap_or_default());
    let stripped = Command::new("strip").arg("-o").arg(&copy).arg(path).status().context("no strip (binutils)")?;
    if stripped.success() { Ok(copy) } else { Err(Error::new(format!("strip {}: {stripped}", path.display()))) }
}
