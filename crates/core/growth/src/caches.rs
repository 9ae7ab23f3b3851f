// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chooses the ring size for a bulk stream on this machine by the sizes of its caches, never by the name of its CPU.
//!
//! A writer waits for each line that the reader's L2 cache still holds. So where L2 has 1 MiB, a ring of twice that
//! size is up to three times as fast as one of the same size. Where L2 has 2 MiB, rings of 2 MiB were the fastest too,
//! by a seventh. Measured on three CPUs (docs/lab/rings.md, ADR 0052).

use std::{fmt, path::Path, sync::OnceLock};

use tombolo_layout::limits::{CAPACITY_DEFAULT, CONTROL_LEN};
use tombolo_os::files::read_text;

use crate::RingBudget;

/// Largest ring that is chosen, as no larger one was seen to be worth its memory.
const MOST: u64 = 2 * CAPACITY_DEFAULT;
/// Divisor of the L3 cache: a ring takes at most the quotient, because others use the cache as well.
const SHARE_OF_L3: u64 = 8;
/// Divisor of the L3 cache: all rings that streams try by themselves together take at most the quotient.
const SHARE_OF_TRIALS: u64 = 2;
/// Multiple of the L2 cache that a busy stream tries as its ring. Where twice the cache helps, this helps more surely.
const TRIED: u64 = 4;
/// Number of CPUs, and of caches of one CPU, that are examined.
const CPUS: u32 = 64;
const INDEXES: u32 = 8;

/// Size of the ring that suits a bulk stream on this machine, and the reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingChoice {
    bytes: u64,
    caches: Option<Caches>,
}

/// Sizes of one CPU's caches in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Caches {
    l2: u64,
    l3: Option<u64>,
}

impl Caches {
    /// Returns the bytes of the L3 cache that one ring may take.
    fn share(self) -> u64 {
        self.l3.map_or(MOST, |l3| l3 / SHARE_OF_L3)
    }
}

impl RingChoice {
    /// Returns the choice for this machine, made once in a process.
    #[must_use]
    pub fn of_this_machine() -> &'static Self {
        static CHOICE: OnceLock<RingChoice> = OnceLock::new();
        CHOICE.get_or_init(|| Self::by(read_caches(Path::new("/sys/devices/system/cpu"))))
    }

    /// Returns the size of the ring in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the size in bytes of the ring that a busy stream tries where the user set no ring size. The stream
    /// measures whether that ring is faster, so it may be larger than what suits all streams.
    #[doc(hidden)]
    #[must_use]
    pub fn tried(&self) -> u64 {
        let tried = self
            .caches
            .map_or(0, |caches| (TRIED * caches.l2).min(caches.share()).checked_ilog2().map_or(0, |bits| 1 << bits));
        tried.clamp(self.bytes, 2 * MOST)
    }

    /// Returns the budget for rings that grow without a request by the user. Together they take a part of the L3 cache.
    #[doc(hidden)]
    pub fn trial_budget() -> &'static RingBudget {
        static BUDGET: OnceLock<RingBudget> = OnceLock::new();
        BUDGET.get_or_init(|| RingBudget::new(Self::of_this_machine().tried_together()))
    }

    /// Returns the bytes of the segments of as many rings as may be tried at once.
    fn tried_together(&self) -> u64 {
        let share = self.caches.and_then(|caches| caches.l3).map_or(0, |l3| l3 / SHARE_OF_TRIALS);
        (share / self.tried()).max(1) * (CONTROL_LEN + self.tried())
    }

    fn by(caches: Option<Caches>) -> Self {
        let bytes = caches.map_or(CAPACITY_DEFAULT, |caches| {
            // Plausible sizes are far from an overflow.
            let twice = (2 * caches.l2).next_power_of_two().min(MOST);
            if twice <= caches.share() { twice.max(CAPACITY_DEFAULT) } else { CAPACITY_DEFAULT }
        });
        Self { bytes, caches }
    }
}

impl fmt::Display for RingChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB, ", self.bytes >> 10)?;
        match self.caches {
            None => write!(f, "the default, as this machine does not show its caches"),
            Some(Caches { l2, l3: None }) => write!(f, "by an L2 cache of {} KiB", l2 >> 10),
            Some(Caches { l2, l3: Some(l3) }) => {
                write!(f, "by an L2 cache of {} KiB and an L3 cache of {} KiB", l2 >> 10, l3 >> 10)
            }
        }
    }
}

/// Returns the caches of the first CPU that shows a plausible L2 cache.
fn read_caches(cpus: &Path) -> Option<Caches> {
    (0..CPUS).find_map(|cpu| {
        let of_cpu = cpus.join(format!("cpu{cpu}/cache"));
        let size = |level, plausible| (0..INDEXES).find_map(|index| read_size(&of_cpu, index, level, &plausible));
        let l2 = size("2", 64 << 10..=64 << 20)?;
        Some(Caches { l2, l3: size("3", 1 << 20..=4 << 30) })
    })
}

/// Returns the size of one cache, if it has that level and holds data.
fn read_size(of_cpu: &Path, index: u32, level: &str, plausible: &std::ops::RangeInclusive<u64>) -> Option<u64> {
    let of_cache = of_cpu.join(format!("index{index}"));
    let read = |name| read_line(&of_cache.join(name));
    if read("level")? != level || !matches!(read("type")?.as_str(), "Data" | "Unified") {
        return None;
    }
    let text = read("size")?;
    let kib: u64 = text.strip_suffix('K')?.parse().ok()?;
    kib.checked_mul(1 << 10).filter(|bytes| plausible.contains(bytes))
}

/// Returns the one short line of a file.
fn read_line(path: &Path) -> Option<String> {
    read_text(path, 32).map(|text| text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use rustix::fs::Mode;

    use super::*;

    /// A folder like `/sys/devices/system/cpu`, removed at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tombolo-caches-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn cache(self, cpu: u32, index: u32, level: &str, kind: &str, size: &str) -> Self {
            let path = self.0.join(format!("cpu{cpu}/cache/index{index}"));
            fs::create_dir_all(&path).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size)] {
                fs::write(path.join(name), format!("{text}\n")).unwrap();
            }
            self
        }

        /// Adds the caches of an x86 CPU.
        fn usual(self, l1: &str, l2: &str, l3: &str) -> Self {
            self.cache(0, 0, "1", "Data", l1)
                .cache(0, 1, "1", "Instruction", "32K")
                .cache(0, 2, "2", "Unified", l2)
                .cache(0, 3, "3", "Unified", l3)
        }

        fn choice(&self) -> RingChoice {
            RingChoice::by(read_caches(&self.0))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn ring_by_caches_of_measured_cpus_is_the_one_measured_as_good() {
        for (name, l1, l2, l3, kib, tried) in [
            ("zen4", "32K", "1024K", "32768K", 2048, (4096, 4)),
            ("zen5", "48K", "1024K", "32768K", 2048, (4096, 4)),
            ("intel-6-207", "48K", "2048K", "266240K", 2048, (4096, 32)),
            ("small", "32K", "256K", "8192K", 1024, (1024, 4)),
            ("little-l3", "32K", "1024K", "4096K", 1024, (1024, 2)),
        ] {
            let choice = Tree::new(name).usual(l1, l2, l3).choice();
            assert_eq!(choice.bytes(), kib << 10, "{name}: {choice}");
            assert_eq!(choice.tried(), tried.0 << 10, "{name}");
            assert_eq!(choice.tried_together(), tried.1 * (choice.tried() + CONTROL_LEN), "{name}");
            assert!(choice.to_string().contains(&format!("L2 cache of {} KiB", l2.trim_end_matches('K'))), "{choice}");
        }
    }

    #[test]
    fn ring_of_a_machine_that_hides_its_caches_is_the_default_and_says_so() {
        let hidden = Tree::new("hidden").choice();
        let no_l2 = Tree::new("no-l2").cache(0, 0, "1", "Data", "32K").choice();
        for choice in [hidden, no_l2] {
            assert_eq!(choice.bytes(), CAPACITY_DEFAULT);
            assert!(choice.to_string().contains("does not show its caches"), "{choice}");
        }
        assert_eq!(Tree::new("no-l3").cache(0, 0, "2", "Unified", "1024K").choice().bytes(), 2 << 20);
        // CPU 0 may be off.
        assert_eq!(Tree::new("later").cache(3, 2, "2", "Unified", "1024K").choice().bytes(), 2 << 20);
    }

    #[test]
    fn ring_by_caches_of_nonsense_is_the_default() {
        for (number, size) in [
            "",
            "0K",
            "K",
            "-1K",
            "1024",
            "1.5M",
            "4K",
            "99999999K",
            "18446744073709551615K",
            "1024K and more than a line holds",
        ]
        .into_iter()
        .enumerate()
        {
            let tree = Tree::new(&format!("nonsense-{number}")).usual("32K", size, "32768K");
            assert_eq!(tree.choice(), RingChoice::by(None), "{size:?}");
        }
        let instructions = Tree::new("instructions").cache(0, 0, "2", "Instruction", "1024K");
        assert_eq!(instructions.choice(), RingChoice::by(None));
        // A pipe without a writer, a folder, and bytes that are no text.
        let tree = Tree::new("kinds").usual("32K", "1024K", "32768K");
        let size = tree.0.join("cpu0/cache/index2/size");
        fs::remove_file(&size).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &size, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(tree.choice(), RingChoice::by(None));
        fs::remove_file(&size).unwrap();
        fs::create_dir(&size).unwrap();
        assert_eq!(tree.choice(), RingChoice::by(None));
        fs::remove_dir(&size).unwrap();
        fs::write(&size, [0xff; 4096]).unwrap();
        assert_eq!(tree.choice(), RingChoice::by(None));
    }
}
