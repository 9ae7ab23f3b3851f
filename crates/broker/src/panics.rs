// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contains panics. A panic is a fault of the broker itself, and harms only those for whom the failed part worked
//! (B-16).
//!
//! If somebody waits for a job that panics, the job returns an error. A long-running thread continues after a rest. The
//! host's broker watches the tasks of the runtime itself.

use std::{
    any::Any,
    io,
    os::fd::AsFd,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Time for which a thread rests after a failure, so that one that fails repeatedly does not occupy a processor.
const REST: Duration = if cfg!(test) { Duration::from_millis(10) } else { Duration::from_secs(1) };

/// Runs `job`, and turns a panic into an error. The data that `job` changes must tolerate being left half changed.
///
/// # Errors
/// The error of `job`, or its panic.
pub fn catch_panic<T>(job: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| Err(io::Error::other(panic_text(&*panic))))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("a fault of tombolod's own: {}", text.unwrap_or("a panic"))
}

/// Runs `work` until it succeeds. After a failure or panic it logs that and, after a rest, runs `work` again with the
/// state that it has. `is_over_after` waits for the rest, and returns true if the work is over by then.
pub fn work_until_done(what: &str, is_over_after: impl Fn(Duration) -> bool, mut work: impl FnMut() -> io::Result<()>) {
    while let Err(error) = catch_panic(&mut work) {
        tracing::error!("{what}: {error}; it goes on after a while");
        if is_over_after(REST) {
            return;
        }
    }
}

/// Returns whether `stop` polls readable within a time.
pub fn is_stopped_within(stop: impl AsFd, time: Duration) -> bool {
    let mut polled = [PollFd::new(&stop, PollFlags::IN)];
    poll(&mut polled, Timespec::try_from(time).ok().as_ref()) == Ok(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_that_panics_has_failed_and_says_why() {
        assert_eq!(catch_panic(|| Ok(7)).unwrap(), 7);
        let failed = catch_panic::<()>(|| panic!("of {}", 7)).unwrap_err();
        assert_eq!(failed.to_string(), "a fault of tombolod's own: of 7");
        let failed = catch_panic::<()>(|| panic!("plainly")).unwrap_err();
        assert!(failed.to_string().ends_with("plainly"));
    }

    #[test]
    fn work_that_fails_and_panics_goes_on_until_it_is_done_or_to_end() {
        let (reads, writes) = rustix::pipe::pipe().unwrap();
        let mut turns = 0;
        work_until_done(
            "work",
            |rest| is_stopped_within(&reads, rest),
            || {
                turns += 1;
                match turns {
                    1 => panic!("it fails"),
                    2 => Err(io::ErrorKind::Other.into()),
                    _ => Ok(()),
                }
            },
        );
        assert_eq!(turns, 3);
        rustix::io::write(&writes, b"x").unwrap();
        work_until_done(
            "work",
            |rest| is_stopped_within(&reads, rest),
            || {
                turns += 1;
                panic!("it fails")
            },
        );
        assert_eq!(turns, 4, "it was to end");
    }
}
