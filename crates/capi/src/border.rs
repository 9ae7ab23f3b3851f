// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The border to C: the time that a call may take, its result, the last error, and the treatment of panics.
#![allow(unsafe_code)]

use std::{
    any::Any,
    borrow::Cow,
    cell::RefCell,
    ffi::{CStr, CString},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use libc::{c_char, c_int, ssize_t};
use tombolo::Deadline;

/// Result of the code behind an exported function.
pub type Outcome<T> = Result<T, Fault>;

/// The reason why a call failed: a number for the program and a line for people.
#[derive(Debug)]
pub struct Fault {
    pub errno: c_int,
    text: Cow<'static, CStr>,
}

impl Fault {
    pub const WOULD_BLOCK: Self = Self::new(libc::EAGAIN, c"not now: the call would have to wait");

    pub const fn new(errno: c_int, text: &'static CStr) -> Self {
        Self { errno, text: Cow::Borrowed(text) }
    }

    pub fn with(errno: c_int, text: &str) -> Self {
        // The text is our own; a NUL in it came from an address, and ends the text there.
        let text = text.split('\0').next().unwrap_or_default();
        Self { errno, text: Cow::Owned(CString::new(text).unwrap_or_default()) }
    }

    fn panicked(payload: &(dyn Any + Send)) -> Self {
        let words = payload.downcast_ref::<&str>().copied();
        let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no words");
        Self::with(libc::ENOTRECOVERABLE, &format!("a fault in Tombolo, please report it: {words}"))
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
        Self::with(error.errno(), &text)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.downcast::<tombolo::Error>() {
            Ok(error) => error.into(),
            Err(error) => Self::with(error.raw_os_error().unwrap_or(libc::EIO), &error.to_string()),
        }
    }
}

/// As a timeout: wait for as long as it takes.
pub const TOMBOLO_FOREVER: i64 = -1;

/// Returns the deadline of a call that was given `timeout_ns` and must wait. Fails with [`Fault::WOULD_BLOCK`] if the
/// call must not wait at all.
pub fn deadline(timeout_ns: i64) -> Outcome<Deadline> {
    match timeout_ns {
        ..=TOMBOLO_FOREVER => Ok(Deadline::NEVER),
        0 => Err(Fault::WOULD_BLOCK),
        ns => Ok(Deadline::after(Duration::from_nanos(ns.unsigned_abs()))),
    }
}

thread_local! {
    static LAST: RefCell<Cow<'static, CStr>> = const { RefCell::new(Cow::Borrowed(c"")) };
}

/// Conversion of an outcome for a C caller.
pub trait Answer {
    /// Type that the exported function returns.
    type InC;
    /// Returns the value for success.
    fn answer(self) -> Self::InC;
    /// Returns the value for failure with `errno`.
    fn failed(errno: c_int) -> Self::InC;
}

/// 0 or `-errno`.
impl Answer for () {
    type InC = c_int;
    fn answer(self) -> c_int {
        0
    }
    fn failed(errno: c_int) -> c_int {
        -errno
    }
}

/// A small number or `-errno`.
impl Answer for c_int {
    type InC = Self;
    fn answer(self) -> Self {
        self
    }
    fn failed(errno: c_int) -> Self {
        -errno
    }
}

/// A length or `-errno`.
impl Answer for usize {
    type InC = ssize_t;
    fn answer(self) -> ssize_t {
        ssize_t::try_from(self).unwrap_or(ssize_t::MAX)
    }
    fn failed(errno: c_int) -> ssize_t {
        -(errno as ssize_t)
    }
}

/// A text, empty on failure.
impl Answer for *const c_char {
    type InC = Self;
    fn answer(self) -> Self {
        self
    }
    fn failed(_: c_int) -> Self {
        c"".as_ptr()
    }
}

/// Runs the body of every exported function. No panic unwinds into the caller, and the error is kept for
/// [`tombolo_last_error`].
pub fn guard<T: Answer>(body: impl FnOnce() -> Outcome<T>) -> T::InC {
    // Unwind safety: everything that a panic could leave half done is behind a mutex, which is then poisoned, or behind
    // a half's turn, which then stays taken.
    let fault = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(done)) => return done.answer(),
        Ok(Err(fault)) => fault,
        Err(payload) => {
            let fault = Fault::panicked(&*payload);
            // The payload's destructor is foreign code as well, so it must not run.
            std::mem::forget(payload);
            fault
        }
    };
    // A thread that is ending may have dropped its last error already.
    let _ = LAST.try_with(|last| last.replace(fault.text));
    T::failed(fault.errno)
}

/// Returns the error of this thread's last failed call as one line, or an empty text if none failed.
///
/// The text stays valid until the next call of this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_last_error() -> *const c_char {
    guard(|| Ok(LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())))
}

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("the version holds a NUL"),
};

/// Returns the version of this library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_version() -> *const c_char {
    guard(|| Ok(VERSION.as_ptr()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn last() -> String {
        LAST.with_borrow(|last| last.to_str().unwrap().to_owned())
    }

    extern "C" fn panics_inside() -> c_int {
        guard(|| -> Outcome<()> { panic!("a canary of {} words", 4) })
    }

    extern "C" fn panics_unguarded() {
        panic!("nobody catches this");
    }

    #[test]
    fn canary_panic_becomes_a_number_and_a_line() {
        assert_eq!(panics_inside(), -libc::ENOTRECOVERABLE);
        assert_eq!(last(), "a fault in Tombolo, please report it: a canary of 4 words");
        let odd: ssize_t = guard(|| -> Outcome<usize> { std::panic::panic_any(7) });
        assert_eq!((odd, last().ends_with("no words")), (-(libc::ENOTRECOVERABLE as ssize_t), true));
    }

    /// Shows the purpose of the guard: without it the same panic ends the whole program.
    #[test]
    fn canary_panic_outside_the_guard_aborts() {
        const SELF: &str = "border::tests::canary_panic_outside_the_guard_aborts";
        if std::env::var_os("TOMBOLO_CAPI_PANIC").is_some() {
            panics_unguarded();
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", SELF]).env("TOMBOLO_CAPI_PANIC", "1").stdout(Stdio::null()).stderr(Stdio::null());
        assert!(child.status().unwrap().code().is_none(), "it should have died of a signal");
    }

    #[test]
    fn errors_become_their_number_and_one_line() {
        assert_eq!(guard(|| Ok(7usize)), 7);
        assert_eq!(guard(|| Ok(())), 0);
        let failed = guard(|| Ok(tombolo::connect("pigeon:post").map(drop)?));
        assert_eq!(failed, -libc::EAFNOSUPPORT);
        assert_eq!(last(), "no backend for \"pigeon\" addresses here; there are: local, vm, xen");
        // A successful call leaves the last error unchanged, like errno.
        assert_eq!((guard(|| Ok(1)), last().starts_with("no backend")), (1, true));
    }

    #[test]
    fn text_with_a_nul_ends_there() {
        assert_eq!(Fault::with(libc::EINVAL, "one\0two").text.to_str(), Ok("one"));
    }

    /// Returns the exports whose body is not inside the guard; `canary_panic_outside_the_guard_aborts` shows what such
    /// a body does.
    fn unguarded(source: &str) -> Vec<&str> {
        let exports = source.split("#[unsafe(no_mangle)]\n").skip(1);
        let body =
            |export: &str| export.split_once("{\n").is_some_and(|(_, body)| body.trim_start().starts_with("guard("));
        exports.filter(|export| !body(export.split("\n}\n").next().unwrap_or(export))).collect()
    }

    #[test]
    fn every_exported_function_is_guarded() {
        let sources = [
            include_str!("border.rs").split("#[cfg(test)]").next().unwrap(),
            include_str!("channel.rs"),
            include_str!("listener.rs"),
            include_str!("messages.rs"),
            include_str!("stream.rs"),
        ];
        let exports: usize = sources.iter().map(|source| source.matches("#[unsafe(no_mangle)]").count()).sum();
        assert!(exports > 35, "{exports}");
        for source in sources {
            assert_eq!(unguarded(source), [""; 0]);
        }
    }

    #[test]
    fn canary_unguarded_export_is_found() {
        let source = "#[unsafe(no_mangle)]\npub extern \"C\" fn tombolo_bad() -> c_int {\n    0\n}\n";
        assert_eq!(unguarded(source).len(), 1);
    }

    #[test]
    fn times_are_relative_negative_is_for_ever_and_zero_does_not_wait() {
        assert_eq!(deadline(TOMBOLO_FOREVER).unwrap(), Deadline::NEVER);
        assert_eq!(deadline(i64::MIN).unwrap(), Deadline::NEVER);
        assert_eq!(deadline(0).unwrap_err().errno, libc::EAGAIN);
        let soon = deadline(1_000_000_000).unwrap().remaining().unwrap();
        assert!(soon <= Duration::from_secs(1) && !soon.is_zero(), "{soon:?}");
        assert!(!deadline(i64::MAX).unwrap().expired());
    }
}
