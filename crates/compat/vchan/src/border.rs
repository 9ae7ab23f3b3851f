// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Translates results at the C boundary: an errno for the program, a line of text for people; catches panics.

use std::{
    any::Any,
    borrow::Cow,
    cell::RefCell,
    ffi::{CStr, CString},
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
};

use libc::c_int;
use nix::errno::Errno;

/// Result of the code behind an exported function.
pub(crate) type Outcome<T> = Result<T, Fault>;

/// Reason why a call failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub errno: c_int,
    pub text: Cow<'static, str>,
}

impl Fault {
    pub(crate) const fn new(errno: c_int, text: &'static str) -> Self {
        Self { errno, text: Cow::Borrowed(text) }
    }

    pub(crate) fn with(errno: c_int, text: impl Into<String>) -> Self {
        Self { errno, text: Cow::Owned(text.into()) }
    }

    /// Returns the same fault with `what` before its text.
    pub(crate) fn of(self, what: &str) -> Self {
        Self { errno: self.errno, text: format!("{what}: {}", self.text).into() }
    }

    fn panicked(payload: &(dyn Any + Send)) -> Self {
        let words = payload.downcast_ref::<&str>().copied();
        let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no words");
        Self::with(libc::ENOTRECOVERABLE, format!("a fault in Tombolo, please report it: {words}"))
    }
}

impl From<tombolo::Error> for Fault {
    fn from(error: tombolo::Error) -> Self {
        let mut text = error.to_string();
        let mut next: &dyn std::error::Error = &error;
        while let Some(source) = next.source() {
            text = format!("{text}: {source}");
            next = source;
        }
        Self::with(error.errno(), text)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::with(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}

impl From<rustix::io::Errno> for Fault {
    fn from(error: rustix::io::Errno) -> Self {
        io::Error::from(error).into()
    }
}

thread_local! {
    static LAST: RefCell<Cow<'static, CStr>> = const { RefCell::new(Cow::Borrowed(c"")) };
}

/// Returns what went wrong in the last call of this thread that failed.
pub(crate) fn last() -> *const libc::c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs the body of an exported function and lets nothing unwind into the caller. On failure sets `errno` and [`last`],
/// and returns `failed`.
#[inline]
pub(crate) fn guard<T>(failed: T, body: impl FnOnce() -> Outcome<T>) -> T {
    guard_with(failed, body, |_| {})
}

/// Does the same as [`guard`] for calls that set something up, and also passes the reason of a failure to `tell`.
#[inline]
pub(crate) fn guard_with<T>(failed: T, body: impl FnOnce() -> Outcome<T>, tell: impl FnOnce(&Fault)) -> T {
    // Unwind safety: all that a panic could leave half done is behind a mutex, which is poisoned then.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(done)) => return done,
        Ok(Err(fault)) => log_fault(&fault, tell),
        Err(payload) => {
            log_fault(&Fault::panicked(&*payload), tell);
            // The payload's destructor is foreign code as well.
            std::mem::forget(payload);
        }
    }
    failed
}

#[cold]
#[inline(never)]
fn log_fault(fault: &Fault, tell: impl FnOnce(&Fault)) {
    let _ = catch_unwind(AssertUnwindSafe(|| tell(fault)));
    let text = fault.text.split('\0').next().unwrap_or_default();
    let text = CString::new(text).unwrap_or_default();
    // A thread that is ending may have lost its last error already.
    let _ = LAST.try_with(|last| last.replace(text.into()));
    Errno::from_raw(fault.errno).set();
}

/// Writes to standard error why nothing was set up, as the original does by default.
pub(crate) fn complain(fault: &Fault) {
    let _ = writeln!(io::stderr(), "tombolo-vchan: {}", fault.text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_panic_becomes_a_number_and_a_line() {
        assert_eq!(guard(-1, || -> Outcome<c_int> { panic!("a canary of {} words", 4) }), -1);
        assert_eq!(Errno::last_raw(), libc::ENOTRECOVERABLE);
        let last = LAST.with_borrow(|last| last.to_str().unwrap().to_owned());
        assert_eq!(last, "a fault in Tombolo, please report it: a canary of 4 words");
    }

    #[test]
    fn good_call_leaves_errno_alone() {
        Errno::EAGAIN.set();
        assert_eq!(guard(-1, || Ok(7)), 7);
        assert_eq!(Errno::last(), Errno::EAGAIN);
    }

    /// Returns the exports whose body is not inside the guard.
    fn unguarded(source: &str) -> Vec<&str> {
        let exports = source.split("#[unsafe(no_mangle)]\n").skip(1);
        let body =
            |export: &str| export.split_once("{\n").is_some_and(|(_, body)| body.trim_start().starts_with("guard"));
        exports.filter(|export| !body(export.split("\n}\n").next().unwrap_or(export))).collect()
    }

    #[test]
    fn every_exported_function_is_guarded() {
        let sources = [include_str!("xen.rs"), include_str!("qubes.rs")];
        let exports: usize = sources.iter().map(|source| source.matches("#[unsafe(no_mangle)]").count()).sum();
        assert_eq!(exports, 13 + 15);
        for source in sources {
            assert_eq!(unguarded(source), [""; 0]);
        }
    }

    #[test]
    fn canary_unguarded_export_is_found() {
        let source = "#[unsafe(no_mangle)]\npub extern \"C\" fn libxenvchan_bad() -> c_int {\n    0\n}\n";
        assert_eq!(unguarded(source).len(), 1);
    }
}
