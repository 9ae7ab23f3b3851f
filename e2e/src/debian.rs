// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fetches kernels and packages from Debian's archive and unpacks them in a cache. Nothing is ever installed.
//!
//! apt fetches them with lists and archives of its own in the cache, so that this needs no privilege and changes
//! nothing of the machine. Fetched files are used without the network until the cache is removed.

use crate::error::{Context, Error, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A choice among the archive's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The kernel that this release of Debian runs.
    Stable,
    /// The newest kernel for this release, from its backports.
    Newest,
}

/// A kernel, with what is needed to build modules for it.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Release, as `uname -r` would print it.
    pub release: String,
    /// Folder in which its packages are unpacked.
    pub root: PathBuf,
}

impl Kernel {
    /// Returns the file to boot.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.root.join(format!("boot/vmlinuz-{}", self.release))
    }

    /// Returns the folder with the kernel's modules.
    #[must_use]
    pub fn modules(&self) -> PathBuf {
        self.root.join(format!("lib/modules/{}/kernel", self.release))
    }

    /// Returns the folder to build modules against.
    #[must_use]
    pub fn headers(&self) -> PathBuf {
        self.root.join(format!("usr/src/linux-headers-{}", self.release))
    }
}

/// The cache of fetched packages.
#[derive(Debug)]
pub struct Archive {
    root: PathBuf,
}

impl Archive {
    /// Opens the cache: `$TOMBOLO_VM_CACHE`, or else Tombolo's folder in the user's cache.
    ///
    /// # Errors
    /// There is no place for the cache.
    pub fn open() -> Result<Self> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = var("TOMBOLO_VM_CACHE")
            .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("tombolo/vm")))
            .or_else(|| var("HOME").map(|home| home.join(".cache/tombolo/vm")))
            .ok_or_else(|| Error::new("no cache: set TOMBOLO_VM_CACHE, XDG_CACHE_HOME or HOME"))?;
        fs::create_dir_all(&root).context(root.display())?;
        Ok(Self { root })
    }

    /// Keeps other runs from writing to the cache meanwhile: two runs must not fetch at once.
    fn lock(&self) -> Result<File> {
        lock(&self.root.join("lock"))
    }

    /// Returns a kernel, and fetches it if it is missing. `boots` tells whether the kernel will be booted or only built
    /// against.
    ///
    /// # Errors
    /// apt or the network is missing, or this Debian's archive has no such kernel.
    pub fn kernel(&self, which: Which, boots: bool) -> Result<Kernel> {
        let name = match (which, boots) {
            (Which::Stable, true) => "kernel-stable",
            (Which::Stable, false) => "headers-stable",
            (Which::Newest, true) => "kernel-newest",
            (Which::Newest, false) => "headers-newest",
        };
        let root = self.root.join(name);
        let done = root.join("release");
        let _lock = self.lock()?;
        if let Ok(release) = fs::read_to_string(&done) {
            return Ok(Kernel { release, root });
        }
        let apt = Apt::new(&self.root, which)?;
        let meta = apt.depends("linux-headers-amd64")?;
        let headers = named(&meta, "linux-headers-")?;
        let release = headers.trim_start_matches("linux-headers-").to_owned();
        let needs = apt.depends(&headers)?;
        let common =
            needs.iter().filter(|name| name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-"));
        let mut packages: Vec<String> = common.cloned().collect();
        if boots {
            packages.push(format!("linux-image-{release}"));
        }
        packages.push(headers);
        apt.unpack(&packages, &root)?;
        relocate(&root, &release)?;
        fs::write(done, &release)?;
        Ok(Kernel { release, root })
    }

    /// Returns the kernel with its own checks that `tools/debug-kernel.sh` has built here.
    ///
    /// # Errors
    /// The script has not built it.
    pub fn debug_kernel(&self) -> Result<Kernel> {
        let root = self.root.join("kernel-debug/root");
        let release =
            fs::read_to_string(root.join("release")).context("no kernel with its own checks (make vm-debug)")?;
        Ok(Kernel { release, root })
    }

    /// Returns one file of a package, and fetches the package if it is missing.
    ///
    /// # Errors
    /// As [`kernel`](Self::kernel).
    pub fn file(&self, package: &str, path: &str) -> Result<PathBuf> {
        let root = self.root.join("packages").join(package);
        let file = root.join(path);
        let _lock = self.lock()?;
        if !file.exists() {
            Apt::new(&self.root, Which::Stable)?.unpack(&[package.to_owned()], &root)?;
        }
        ensure_exists(file)
    }
}

impl Archive {
    /// Unpacks packages together in the folder `name`, with all that they depend on whose names `wanted` accepts.
    ///
    /// # Errors
    /// As [`kernel`](Self::kernel).
    pub fn packages(&self, name: &str, roots: &[&str], wanted: fn(&str) -> bool) -> Result<PathBuf> {
        let root = self.root.join(name);
        let done = root.join("done");
        let _lock = self.lock()?;
        if done.exists() {
            return Ok(root);
        }
        let apt = Apt::new(&self.root, Which::Stable)?;
        let mut chosen: Vec<String> = roots.iter().map(|name| (*name).to_owned()).collect();
        let mut seen = 0;
        while let Some(package) = chosen.get(seen).cloned() {
            seen += 1;
            for name in apt.depends(&package)?.into_iter().filter(|name| wanted(name)) {
                if !chosen.contains(&name) {
                    chosen.push(name);
                }
            }
        }
        apt.unpack(&chosen, &root)?;
        fs::write(done, "")?;
        Ok(root)
    }
}

/// Waits until no other process holds the lock `path`, and prints a message if one does. Dropping the file releases the
/// lock.
///
/// # Errors
/// The file cannot be created.
pub fn lock(path: &Path) -> Result<File> {
    let lock = File::create(path).context(path.display())?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("waiting for another run, which holds {}", path.display());
        flock(&lock, FlockOperation::LockExclusive)?;
    }
    Ok(lock)
}

/// Corrects a path: the headers' makefile includes that of all flavours by the path at which the package would be
/// installed.
fn relocate(root: &Path, release: &str) -> Result<()> {
    let makefile = root.join(format!("usr/src/linux-headers-{release}/Makefile"));
    let text = fs::read_to_string(&makefile).context(makefile.display())?;
    let here = format!("include {}/usr/src/", root.display());
    fs::write(&makefile, text.replace("include /usr/src/", &here))?;
    Ok(())
}

fn named(packages: &[String], prefix: &str) -> Result<String> {
    let found = packages.iter().find(|name| name.starts_with(prefix));
    found.cloned().ok_or_else(|| Error::new(format!("the archive has no {prefix}…")))
}

fn ensure_exists(file: PathBuf) -> Result<PathBuf> {
    match file.exists() {
        true => Ok(file),
        false => Err(Error::new(format!("{} is not in its package", file.display()))),
    }
}

/// apt with its state in the cache.
struct Apt {
    options: Vec<String>,
    archives: PathBuf,
}

impl Apt {
    fn new(cache: &Path, which: Which) -> Result<Self> {
        let dir = cache.join(match which {
            Which::Stable => "apt",
            Which::Newest => "apt-newest",
        });
        let sources = dir.join("sources.d");
        let archives = dir.join("archives");
        for path in [&sources, &archives.join("partial"), &dir.join("lists/partial")] {
            fs::create_dir_all(path).context(path.display())?;
        }
        copy_sources(&sources)?;
        let mut options: Vec<String> = [
            ("Dir::State::lists", dir.join("lists")),
            ("Dir::Cache", dir.clone()),
            ("Dir::Etc::sourceparts", sources.clone()),
            ("Dir::Etc::sourcelist", PathBuf::from("/dev/null")),
        ]
        .into_iter()
        .flat_map(|(key, value)| ["-o".to_owned(), format!("{key}={}", value.display())])
        .collect();
        // Otherwise apt, when run by root, would switch to a user who cannot write here.
        options.extend(["-o", "APT::Sandbox::User=root", "-q"].map(str::to_owned));
        let mut apt = Self { options, archives };
        apt.run("apt-get", &["update"])?;
        if which == Which::Newest {
            let suite = apt.add_backports(&sources)?;
            apt.run("apt-get", &["update"])?;
            apt.options.extend(["-t".to_owned(), suite]);
        }
        Ok(apt)
    }

    fn run(&self, tool: &str, args: &[&str]) -> Result<String> {
        let mut command = Command::new(tool);
        command.args(&self.options).args(args).current_dir(&self.archives);
        command.env("LC_ALL", "C").env("TMPDIR", &self.archives);
        let output = command.stdin(Stdio::null()).output().context(format!("no {tool}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(Error::new(format!("{tool} {}: {}", args.join(" "), said.trim()))),
        }
    }

    /// Adds the backports of the release in use, from the site of its main archive. Returns the suite's name.
    fn add_backports(&self, sources: &Path) -> Result<String> {
        let format = "$(SITE) $(CODENAME) $(COMPONENT)";
        let text = self.run("apt-get", &["indextargets", "--format", format, "Created-By: Packages"])?;
        let main = text.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [site, codename, "main"] if !codename.contains('-') => Some((site.to_owned(), codename.to_owned())),
            _ => None,
        });
        let (site, codename) = main.ok_or_else(|| Error::new(format!("apt knows no main archive: {text}")))?;
        let suite = format!("{codename}-backports");
        fs::write(sources.join("backports.list"), format!("deb {site} {suite} main\n"))?;
        Ok(suite)
    }

    fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = self.run("apt-cache", &["depends", package])?;
        let names = text.lines().filter_map(|line| line.trim_start_matches([' ', '|']).strip_prefix("Depends: "));
        Ok(names.map(str::to_owned).collect())
    }

    fn unpack(&self, packages: &[String], to: &Path) -> Result<()> {
        eprintln!("fetching {}", packages.join(" "));
        let before: Vec<PathBuf> = files(&self.archives)?;
        for stale in before.iter().filter(|path| path.extension().is_some_and(|end| end == "deb")) {
            fs::remove_file(stale)?;
        }
        let mut args = vec!["download"];
        args.extend(packages.iter().map(String::as_str));
        self.run("apt-get", &args)?;
        fs::create_dir_all(to)?;
        for deb in files(&self.archives)?.iter().filter(|path| path.extension().is_some_and(|end| end == "deb")) {
            let unpacked = Command::new("dpkg-deb").arg("-x").arg(deb).arg(to).status().context("dpkg-deb")?;
            if !unpacked.success() {
                return Err(Error::new(format!("dpkg-deb -x {}: {unpacked}", deb.display())));
            }
            fs::remove_file(deb)?;
        }
        Ok(())
    }
}

/// Copies the machine's own sources, so that its administrator chooses the mirrors and keys.
fn copy_sources(to: &Path) -> Result<()> {
    let mut sources = files(Path::new("/etc/apt/sources.list.d")).unwrap_or_default();
    sources.push(PathBuf::from("/etc/apt/sources.list"));
    for source in sources {
        let known = source.extension().is_some_and(|end| end == "list" || end == "sources");
        if let (true, Some(name), true) = (known, source.file_name(), source.exists()) {
            fs::copy(&source, to.join(name)).context(source.display())?;
        }
    }
    Ok(())
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).context(folder.display())?;
    let mut paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>()?;
    paths.retain(|path| path.is_file());
    paths.sort();
    Ok(paths)
}
