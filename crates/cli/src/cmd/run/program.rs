// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Detects programs that take no preloaded library, or make their calls without it, so that the user is told.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File},
    io::{Read, Seek},
    os::unix::{ffi::OsStringExt, fs::PermissionsExt},
    path::{Path, PathBuf},
};

use super::elf::Elf;

/// Largest number of interpreters of interpreters that are followed, as in the kernel.
const SCRIPTS: usize = 5;
/// Bytes of a script's first line.
const LINE: u64 = 256;

/// Returns the file that `exec` will take.
pub fn find(name: &OsStr) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return Some(path.to_owned());
    }
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Reason why the library will not be in a program, or sees nothing of what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// The program's file gives it another user's rights, or capabilities.
    Rights,
    Static,
    /// Static as above, and made by Go.
    StaticGo,
    /// Made by Go, with libc.
    Go,
    /// The program is for another machine than the library.
    Machine,
    /// This loader, of another libc than the library's, loads the program.
    Loader(String),
}

impl Obstacle {
    /// Returns whether forbidding system calls would cost the program the rights that its file gives it.
    pub fn is_rights(&self) -> bool {
        *self == Self::Rights
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rights => {
                "runs with another user's rights, or with capabilities of its file, so no library can be preloaded"
            }
            Self::Static => "is linked statically, so no library can be preloaded",
            Self::StaticGo => "is a Go program that is linked statically, so no library can be preloaded",
            Self::Go => "is a Go program, which makes its system calls itself, so the library sees nothing of them",
            Self::Machine => "is for another machine than the library, so it cannot be preloaded",
            Self::Loader(loader) => {
                return write!(f, "is loaded by {loader}, and the library needs glibc, so it cannot be preloaded");
            }
        })
    }
}

/// File that will run: the program, or the last of its interpreters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Runs {
    /// This file.
    File(PathBuf),
    /// The named interpreter does not exist.
    Missing(PathBuf),
    /// Each interpreter is interpreted by another.
    Endless,
}

/// Follows the first lines of scripts.
pub fn runs(path: &Path) -> Runs {
    let mut path = path.to_owned();
    for _ in 0..SCRIPTS {
        match File::open(&path).ok().and_then(|mut file| interpreter(&mut file)) {
            Some(next) if !next.is_file() => return Runs::Missing(next),
            Some(next) => path = next,
            None => return Runs::File(path),
        }
    }
    Runs::Endless
}

/// Returns the interpreter that a script names, through `env` or directly; `None` for a file that is no script.
fn interpreter(file: &mut File) -> Option<PathBuf> {
    let mut line = Vec::new();
    file.take(LINE).read_to_end(&mut line).ok()?;
    let line = line.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let first = PathBuf::from(OsString::from_vec(words.next()?.to_vec()));
    if first.file_name() != Some(OsStr::new("env")) {
        return Some(first);
    }
    // Options and assignments of `env` come before the program.
    let named = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    let named = named.map(|word| OsString::from_vec(word.to_vec()));
    Some(named.map_or(first, |name| find(&name).unwrap_or_else(|| name.into())))
}

/// Returns what keeps the library at `library` out of the program, or from seeing what it does; `None` if no such
/// obstacle is found.
pub fn obstacle(path: &Path, library: &Path) -> Option<Obstacle> {
    let Runs::File(path) = runs(path) else { return None };
    let mode = fs::metadata(&path).ok()?.permissions().mode();
    if mode & 0o6000 != 0 || rustix::fs::getxattr(&path, "security.capability", &mut [0; 64][..]).is_ok() {
        return Some(Obstacle::Rights); // It may not be ours to read.
    }
    let read = |path: &Path| {
        let mut file = File::open(path).ok()?;
        file.rewind().ok()?;
        Elf::read(&mut file)
    };
    let program = read(&path)?;
    match &program.loader {
        _ if read(library).is_some_and(|library| library.machine != program.machine) => Some(Obstacle::Machine),
        None if program.is_go => Some(Obstacle::StaticGo),
        None => Some(Obstacle::Static),
        Some(_) if program.is_go => Some(Obstacle::Go),
        Some(loader) if !loader.contains("/ld-linux") => Some(Obstacle::Loader(loader.clone())),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Judges a program as if this one were the library.
    fn judge(path: &Path) -> Option<Obstacle> {
        obstacle(path, &env::current_exe().unwrap())
    }

    #[test]
    fn program_with_an_interpreter_can_be_preloaded_and_text_is_not_judged() {
        assert_eq!(judge(&env::current_exe().unwrap()), None);
        assert_eq!(judge(Path::new(file!())), None);
    }

    #[test]
    fn program_of_another_kind_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        let mut own = vec![0; 20];
        File::open(env::current_exe().unwrap()).unwrap().read_exact(&mut own).unwrap();
        let mut file = vec![0_u8; 64 + 56 + 32];
        file[..20].copy_from_slice(&own);
        (file[32], file[54], file[56]) = (64, 56, 1);
        file[64] = 1; // PT_LOAD
        let is = |file: &[u8], wanted: Option<Obstacle>| {
            fs::write(&path, file).unwrap();
            assert_eq!(judge(&path), wanted);
        };
        is(&file, Some(Obstacle::Static));
        file[64] = 3;
        (file[64 + 8], file[64 + 32]) = (120, 28);
        file[120..148].copy_from_slice(b"/lib64/ld-linux-x86-64.so.2\0");
        is(&file, None);
        file[120..148].copy_from_slice(b"/lib/ld-musl-x86_64.so.1\0\0\0\0");
        is(&file, Some(Obstacle::Loader("/lib/ld-musl-x86_64.so.1".into())));
        file[18] ^= 1;
        is(&file, Some(Obstacle::Machine));
        is(&file[..60], None);
    }

    #[test]
    fn script_is_what_interprets_it() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        let is = |line: &str, wanted: Runs| {
            fs::write(&one, line).unwrap();
            assert_eq!(runs(&one), wanted, "{line}");
        };
        let shell = Runs::File(find(OsStr::new("sh")).unwrap());
        is("#!/bin/sh -e\n", Runs::File("/bin/sh".into()));
        is("#! /usr/bin/env sh\n", shell.clone());
        is("#!/usr/bin/env -S LANG=C sh -e\nexit", shell.clone());
        is("#!/nowhere/at/all", Runs::Missing("/nowhere/at/all".into()));
        is("no script", Runs::File(one.clone()));
        fs::write(&two, "#!/usr/bin/env sh").unwrap();
        is(&format!("#!{}\n", two.display()), shell);
        is(&format!("#!{}\n", one.display()), Runs::Endless);
    }
}
