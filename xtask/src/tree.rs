// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the files of the project, read once into memory, so that checks are functions of text.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Ends of the names of files that are read; of other files only the path is known.
const TEXT: [&str; 12] =
    [".rs", ".c", ".h", ".py", ".sh", ".md", ".jsonl", ".txt", "Makefile", "Kbuild", "Cargo.lock", ".ci/run"];
/// Hidden folders that belong to the project. All other hidden folders are skipped.
const HIDDEN: [&str; 3] = [".cargo", ".ci", ".github"];
/// Folders that contain build results.
const BUILT: [&str; 2] = ["target", "__pycache__"];

/// All files of the project by their path from its root, with `/` between folders.
#[derive(Debug, Default)]
pub struct Tree {
    text: BTreeMap<String, String>,
    paths: BTreeSet<String>,
}

impl Tree {
    /// Reads the project at `root`.
    pub fn load(root: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        tree.walk(root, "")?;
        Ok(tree)
    }

    /// Makes a tree of the given files, for tests.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self::default();
        for (path, text) in files {
            for (at, _) in path.match_indices('/') {
                tree.paths.insert(path[..at].to_owned());
            }
            tree.paths.insert((*path).to_owned());
            tree.text.insert((*path).to_owned(), (*text).to_owned());
        }
        tree
    }

    fn walk(&mut self, root: &Path, folder: &str) -> Result<(), String> {
        let shown = root.join(folder);
        let entries = fs::read_dir(&shown).map_err(|e| format!("cannot list {}: {e}", shown.display()))?;
        for entry in entries {
            let entry = entry.map_err(|e| format!("cannot list {}: {e}", shown.display()))?;
            let kind = entry.file_type().map_err(|e| format!("{}: {e}", entry.path().display()))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            if kind.is_dir() {
                let hidden = name.starts_with('.') && !HIDDEN.contains(&name.as_str());
                if !hidden && !BUILT.contains(&name.as_str()) {
                    self.walk(root, &path)?;
                    self.paths.insert(path);
                }
            } else if kind.is_file() {
                if TEXT.iter().any(|end| path.ends_with(end)) {
                    let text = fs::read_to_string(entry.path()).map_err(|e| format!("{path}: {e}"))?;
                    self.text.insert(path.clone(), text);
                }
                self.paths.insert(path);
            }
        }
        Ok(())
    }

    /// Returns whether there is such a file or folder.
    pub fn has(&self, path: &str) -> bool {
        self.paths.contains(path)
    }

    /// Returns the text of a file, if it is one of those that are read.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.text.get(path).map(String::as_str)
    }

    /// Returns path and text of the files whose path ends with one of `ends`.
    pub fn files<'a>(&'a self, ends: &'a [&str]) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.text
            .iter()
            .filter(|(path, _)| ends.iter().any(|end| path.ends_with(end)))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }
}
