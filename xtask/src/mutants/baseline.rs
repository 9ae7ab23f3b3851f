// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes the known results of mutants: the content of each file that was tried, the survivors, and why they
//! may survive.

use std::{collections::BTreeMap, fmt};

/// Reason of a survivor until a person gives it one.
const NO_REASON: &str = "TODO";

/// Known results of a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct File {
    form: String,
    /// Number of mutants that were tried.
    count: usize,
    /// Survivors by name: the number of mutants with that name, and why they may survive.
    survivors: BTreeMap<String, (usize, String)>,
}

/// The whole of `tools/mutants/baseline`:
///
/// ```text
/// file crates/a/src/b.rs 1f0c… 71
///   2 replace c -> bool with true
///     the answer is a hint, and either is right
/// ```
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Baseline {
    head: String,
    files: BTreeMap<String, File>,
}

/// Returns a mutant's name without its position in the file, which changes with every line above it.
pub fn name_of(line: &str) -> String {
    let numeric = |part: &&str| part.chars().all(|c| c.is_ascii_digit());
    let mut parts = line.splitn(4, ':');
    match (parts.next(), parts.next().filter(numeric), parts.next().filter(numeric), parts.next()) {
        (Some(_), Some(_), Some(_), Some(name)) => name.trim().to_owned(),
        _ => line.trim().to_owned(),
    }
}

impl Baseline {
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut baseline = Self::default();
        let (mut file, mut survivor): (Option<&mut File>, Option<String>) = (None, None);
        for line in text.lines() {
            let wrong = || format!("tools/mutants/baseline: what is `{line}`?");
            if let Some(comment) = line.strip_prefix('#') {
                baseline.head.push_str(&format!("#{comment}\n"));
            } else if let Some(rest) = line.strip_prefix("file ") {
                let [name, form, count] = rest.split(' ').collect::<Vec<_>>()[..] else { return Err(wrong()) };
                let entry = baseline.files.entry(name.to_owned()).or_default();
                (entry.form, entry.count) = (form.to_owned(), count.parse().map_err(|_| wrong())?);
                (file, survivor) = (Some(entry), None);
            } else if let Some(reason) = line.strip_prefix("    ") {
                let known = file.as_mut().zip(survivor.as_ref()).and_then(|(file, name)| file.survivors.get_mut(name));
                known.ok_or_else(wrong)?.1 = reason.trim().to_owned();
            } else if let Some(rest) = line.strip_prefix("  ") {
                let (count, name) = rest.split_once(' ').ok_or_else(wrong)?;
                let count = count.parse().map_err(|_| wrong())?;
                let into = file.as_mut().ok_or_else(wrong)?;
                into.survivors.insert(name.to_owned(), (count, String::new()));
                survivor = Some(name.to_owned());
            } else if !line.trim().is_empty() {
                return Err(wrong());
            }
        }
        for (name, file) in &baseline.files {
            if file.count == 0 {
                return Err(format!("tools/mutants/baseline: not one mutant of {name} was tried"));
            }
            if let Some((survivor, _)) = file.survivors.iter().find(|(_, (_, why))| why.is_empty() || why == NO_REASON)
            {
                return Err(format!("tools/mutants/baseline: no reason why `{survivor}` of {name} survives"));
            }
        }
        Ok(baseline)
    }

    #[cfg(test)]
    pub fn files(&self) -> impl Iterator<Item = &String> {
        self.files.keys()
    }

    /// Returns the hash of the content in which a file was tried.
    pub fn form(&self, file: &str) -> Option<&String> {
        self.files.get(file).map(|file| &file.form)
    }

    /// Returns the known survivors that did not survive this time, or fewer of which survived than are known.
    pub fn gone(&self, file: &str, survived: &[String]) -> Vec<&String> {
        let known = self.files.get(file).into_iter().flat_map(|file| &file.survivors);
        let now = |name: &String| survived.iter().filter(|one| *one == name).count();
        known.filter(|(name, (count, _))| now(name) < *count).map(|(name, _)| name).collect()
    }

    /// Returns the mutants of `survived` that are not known, or that are more than are known.
    pub fn unknown<'a>(&self, file: &str, survived: &'a [String]) -> Vec<&'a String> {
        let mut left: BTreeMap<&str, usize> = BTreeMap::new();
        let known = self.files.get(file).into_iter().flat_map(|file| &file.survivors);
        left.extend(known.map(|(name, (count, _))| (name.as_str(), *count)));
        let mut is_unknown = |name: &&String| match left.get_mut(name.as_str()) {
            Some(count) if *count > 0 => {
                *count -= 1;
                false
            }
            _ => true,
        };
        survived.iter().filter(|name| is_unknown(name)).collect()
    }

    /// Records the survivors. A new survivor has no reason yet, and is refused until it gets one.
    pub fn set(&mut self, file: &str, form: &str, count: usize, survived: &[String]) {
        let before = self.files.remove(file).unwrap_or_default();
        let mut now = File { form: form.to_owned(), count, ..File::default() };
        for name in survived {
            let reason = before.survivors.get(name).map_or(NO_REASON, |(_, reason)| reason);
            now.survivors.entry(name.clone()).or_insert((0, reason.to_owned())).0 += 1;
        }
        self.files.insert(file.to_owned(), now);
    }
}

impl fmt::Display for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.head)?;
        for (name, file) in &self.files {
            writeln!(f, "file {name} {} {}", file.form, file.count)?;
            for (name, (count, reason)) in &file.survivors {
                writeln!(f, "  {count} {name}\n    {reason}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# head\nfile a.rs 0123 7\n  2 replace f -> bool with true\n    a hint\nfile b.rs 4567 1\n";

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn baseline_is_written_as_it_was_read() {
        let baseline = Baseline::parse(TEXT).unwrap();
        assert_eq!(baseline.to_string(), TEXT);
        assert_eq!(baseline.form("a.rs").unwrap(), "0123");
    }

    #[test]
    fn name_has_no_place() {
        let line = "crates/a/src/b.rs:12:5: replace <impl T for U>::f -> bool with true";
        assert_eq!(name_of(line), "replace <impl T for U>::f -> bool with true");
        assert_eq!(name_of("replace a::b with ()"), "replace a::b with ()");
    }

    #[test]
    fn canary_survivor_beyond_the_baseline_is_unknown() {
        let baseline = Baseline::parse(TEXT).unwrap();
        let known = "replace f -> bool with true";
        assert!(baseline.unknown("a.rs", &names(&[known, known])).is_empty());
        assert_eq!(baseline.unknown("a.rs", &names(&[known, known, known])).len(), 1);
        assert_eq!(baseline.unknown("a.rs", &names(&["replace g with ()"])).len(), 1);
        assert_eq!(baseline.unknown("c.rs", &names(&[known])).len(), 1);
    }

    #[test]
    fn canary_survivor_without_a_reason_is_refused() {
        let mut baseline = Baseline::parse(TEXT).unwrap();
        baseline.set("a.rs", "89ab", 9, &names(&["replace f -> bool with true", "replace g with ()"]));
        let written = baseline.to_string();
        assert!(written.contains("1 replace f -> bool with true\n    a hint"), "{written}");
        assert!(Baseline::parse(&written).unwrap_err().contains("replace g with ()"));
        assert!(Baseline::parse("file a.rs 1 1\n  1 replace f\n").is_err());
        assert!(Baseline::parse("file a.rs 1 0\n").unwrap_err().contains("not one mutant"));
        assert!(Baseline::parse("    reason of nothing\n").is_err() && Baseline::parse("rubbish\n").is_err());
    }
    #[test]
    fn canary_survivor_that_is_there_no_more_is_named() {
        let baseline = Baseline::parse(TEXT).unwrap();
        let known = "replace f -> bool with true";
        assert!(baseline.gone("a.rs", &names(&[known, known])).is_empty());
        assert_eq!(baseline.gone("a.rs", &names(&[known, "replace g with ()"])), [known]);
        assert!(baseline.gone("b.rs", &[]).is_empty() && baseline.gone("c.rs", &[]).is_empty());
    }
}
