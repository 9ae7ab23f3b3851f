// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a wait reports: whatever was written before something that it reports, it reports too (S-14).
//!
//! There are two places to look: shared memory, and the kernel, which has the events of other descriptors and the rings of
//! connections that nobody looks at. Whoever finds something in one of them has yet to look at both, since what was written
//! before may have come after his last look there. So he looks until a whole round finds nothing more. A model
//! (`tests/gather.rs`) refutes each shorter way.

/// What the kernel had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelReply {
    /// Events that go to the program as they are. They are reported by having been asked for.
    pub plain: usize,
    /// Notifications and the like, after which there may be more to be found in shared memory.
    pub hints: bool,
}

/// Rounds that bring nothing, after which a wait believes notifications no more.
const FRUITLESS: u32 = 16;

/// Where a wait looks.
pub trait Sources {
    /// Why the kernel could not be asked.
    type Error;

    /// Looks at shared memory, and reports what is ready there and was not reported by this wait: so much. One that the
    /// report has no room for is left.
    fn collect(&mut self) -> usize;

    /// Asks the kernel, without waiting. Reports its plain events as far as there is room.
    ///
    /// # Errors
    /// What the kernel says.
    fn ask(&mut self) -> Result<KernelReply, Self::Error>;

    /// Whether there is room for more.
    fn has_room(&self) -> bool;
}

/// Gathers what is to be reported, after the kernel `said` this much, if it was asked. One who has found nothing and is
/// about to sleep need not ask (`idle`).
///
/// The kernel repeats an event as long as it holds, so after it gave one it is not asked again: that would report it twice.
///
/// # Errors
/// What the kernel says where nothing was found before.
pub fn gather<S: Sources>(sources: &mut S, said: Option<KernelReply>, idle: bool) -> Result<usize, S::Error> {
    let KernelReply { plain, .. } = said.unwrap_or_default();
    let mut found = plain;
    let mut may_ask = plain == 0;
    // Whether the kernel was asked since something was last found.
    let mut asked = said.is_some();
    let mut fruitless = 0;
    loop {
        let new = sources.collect();
        found += new;
        asked &= new == 0;
        fruitless = if new == 0 { fruitless + 1 } else { 0 };
        if fruitless > FRUITLESS || !sources.has_room() || asked || found == 0 && idle || new == 0 && !may_ask {
            return Ok(found);
        }
        if may_ask {
            match sources.ask() {
                Ok(more) => {
                    found += more.plain;
                    may_ask = more.plain == 0;
                    asked = more == KernelReply::default();
                    if asked && new == 0 {
                        return Ok(found);
                    }
                }
                Err(error) if found == 0 => return Err(error),
                Err(_) => return Ok(found),
            }
        }
    }
}
