// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes the lines of JSON from which a report is made: measurements, skipped ones, and the circumstances of
//! runs.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Os, Result};
use crate::result::{Measurement, Skip};

/// One line of JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Record {
    /// Circumstances of the measurements.
    About {
        /// All of them.
        about: About,
    },
    /// A skipped measurement.
    Skip {
        /// Which one, and why.
        skip: Skip,
    },
    /// A measurement.
    Measurement(Box<Measurement>),
}

/// Circumstances of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// Program and version.
    pub program: String,
    /// Command line.
    pub command: String,
    /// Beginning of the run, in UTC.
    pub date: String,
    /// Processor.
    pub cpu: String,
    /// CPUs that the run might use.
    pub cpus: usize,
    /// CPUs to which the two endpoints were tied.
    pub pinned: [usize; 2],
    /// Bytes of memory of the machine.
    pub memory: u64,
    /// Kernel.
    pub kernel: String,
    /// Load of the minute before the run: the number of processes that were running or ready to run.
    pub load: f64,
}

/// All lines of one or several files.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Records {
    /// Runs, in the order of the files.
    pub about: Vec<About>,
    /// Results.
    pub measurements: Vec<Measurement>,
    /// Measurements that are missing.
    pub skips: Vec<Skip>,
    /// Remarks on how well several files can be compared.
    pub notes: Vec<String>,
}

impl Records {
    /// Adds a line.
    pub fn add(&mut self, record: Record) {
        match record {
            Record::About { about } => self.about.push(about),
            Record::Skip { skip } => self.skips.push(skip),
            Record::Measurement(measurement) => self.measurements.push(*measurement),
        }
    }

    /// Reads a file of lines as [`crate::main`] prints them.
    ///
    /// # Errors
    /// [`Error::Usage`] names the file, and the line that is no result.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).map_err(|e| Error::Usage(format!("cannot read {shown}: {e}")))?;
        let mut records = Self::default();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let record =
                serde_json::from_str(line).map_err(|_| Error::Usage(format!("{shown}:{}: not a result", at + 1)))?;
            records.add(record);
        }
        if records.measurements.is_empty() {
            return Err(Error::Usage(format!("{shown}: no results in it")));
        }
        Ok(records)
    }

    /// Adds the records of another file. A result that both have is taken from the first; the other's figure only tells
    /// how far the two may be compared.
    pub fn merge(&mut self, other: Self, name: &str) {
        self.about.extend(other.about);
        for skip in other.skips {
            if !self.skips.contains(&skip) {
                self.skips.push(skip);
            }
        }
        self.notes.extend(other.notes);
        let (mut ratios, mut added, mut elsewhere) = (Vec::new(), 0, 0);
        for m in other.measurements {
            match self.measurements.iter().find(|mine| mine.same_question(&m)) {
                Some(mine) => {
                    ratios.push(m.median / mine.median);
                    elsewhere += usize::from(m.placement != mine.placement);
                }
                None => {
                    added += 1;
                    self.measurements.push(m);
                }
            }
        }
        ratios.retain(|ratio| ratio.is_finite());
        if let Some(middle) = crate::stats::median(&mut ratios) {
            let warning = match elsewhere {
                0 => String::new(),
                n => {
                    format!(" {n} of them were taken while the CPUs were elsewhere: measure again before you compare.")
                }
            };
            self.notes.push(format!(
                "{name} adds {added} results. Of {} that it has as well as the files before it, which are shown, its own are \
                 {middle:.2} times theirs in the median, {:.2} to {:.2} at the ends.{warning}",
                ratios.len(),
                ratios[0],
                ratios[ratios.len() - 1],
            ));
        } else if added > 0 {
            self.notes.push(format!("{name} adds {added} results, and has none in common with the files before it."));
        }
    }

    /// Returns all records as lines of JSON.
    ///
    /// # Errors
    /// None that data of these types can cause.
    pub fn lines(&self) -> Result<String> {
        let about = self.about.iter().map(|about| Record::About { about: about.clone() });
        let skips = self.skips.iter().map(|skip| Record::Skip { skip: skip.clone() });
        let results = self.measurements.iter().map(|m| Record::Measurement(Box::new(m.clone())));
        about.chain(results).chain(skips).map(|record| record.line()).collect()
    }
}

impl Record {
    /// Returns the record as a line of JSON, with its line end.
    ///
    /// # Errors
    /// None that data of this type can cause.
    pub fn line(&self) -> Result<String> {
        let json = serde_json::to_string(self).map_err(std::io::Error::from).os("writing JSON")?;
        Ok(json + "\n")
    }
}

impl About {
    /// Describes this program on this machine, now.
    pub fn now(pinned: [usize; 2]) -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_matches([':', ' ', '\t']).to_owned())
        };
        let cpu = field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
        let memory = field(&read("/proc/meminfo"), "MemTotal").and_then(|kib| kib.trim_end_matches(" kB").parse().ok());
        let load = read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok());
        let uname = rustix::system::uname();
        Self {
            program: format!("{} {}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
            command: command(std::env::args()),
            date: date(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())),
            cpu,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            pinned,
            memory: memory.map_or(0, |kib: u64| kib * 1024),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            load: load.unwrap_or(0.0),
        }
    }
}

/// Returns a command line without the folders of this machine.
fn command(words: impl Iterator<Item = String>) -> String {
    let last = |word: String| word.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned();
    words.map(last).collect::<Vec<_>>().join(" ")
}

/// Formats seconds since 1970 as `2026-11-20 13:05 UTC`.
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Counted in years that begin with March, in eras of 400 years, so that the leap day is the last day of a year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn date_of_leap_days_and_ends_of_centuries_is_right() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_795_179_631, "2026-11-20 13:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn command_names_no_folder() {
        let words = ["/home/me/target/tombolo", "bench", "--report", "/tmp/x/there/", "--quick"];
        assert_eq!(command(words.into_iter().map(String::from)), "tombolo bench --report there --quick");
    }
}
