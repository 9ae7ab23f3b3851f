// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gathers what a wait reports: if it reports an event, it also reports whatever was written before that (S-14).
//!
//! There are two places to look: shared memory, and the kernel, which has the events of other descriptors, and the
//! notifications of connections that no thread looks at. Whoever finds something in one of them must still look at
//! both, since what was written before may have come after the last look there. So the wait looks until a whole round
//! finds nothing more. A model (`tests/gather.rs`) finds a counterexample to each shorter procedure.

/// Answer of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelReply {
    /// Number of events that go to the program as they are. Asking the kernel reports them.
    pub plain: usize,
    /// Whether there were notifications and the like, after which there may be more in shared memory.
    pub hints: bool,
}

/// Number of rounds that find nothing, after which a wait no longer trusts notifications.
const FRUITLESS: u32 = 16;

/// Places where a wait looks.
pub trait Sources {
    /// Error of asking the kernel.
    type Error;

    /// Looks at shared memory, and reports what is ready there and was not reported by this wait. Returns the number of
    /// these. What the report has no room for is left.
    fn collect(&mut self) -> usize;

    /// Asks the kernel, without waiting. Reports its plain events as far as there is room.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn ask(&mut self) -> Result<KernelReply, Self::Error>;

    /// Returns whether there is room for more.
    fn has_room(&self) -> bool;
}

/// Gathers what is to be reported, after the kernel's answer `said`, if it was asked. A caller that has found nothing
/// and is about to sleep need not ask the kernel (`idle`). Returns the number of events reported.
///
/// The kernel repeats an event as long as its condition holds, so after it gave one it is not asked again: that would
/// report it twice.
///
/// # Errors
/// Returns the kernel's error where nothing was found before.
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
