// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Process 1 of dom0 and of domUs.
//!
//! The kernel passes unknown words of its command line to process 1 as its environment: a domU reads its address there.

use crate::agent::{answer, load_module, open_raw, prepare};
use crate::ensure;
use crate::error::{Context, Error, Result};
use crate::guest::until;
use crate::line_reader::within;
use rustix::mount::{MountFlags, mount};
use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write, copy};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Environment variable with a domU's address.
pub const ADDRESS: &str = "TOMBOLO_ADDRESS";
/// Network that dom0 bridges.
pub const NETWORK: &str = "10.9.0";
/// Name of the bridge.
pub const BRIDGE: &str = "xenbr0";
/// Tag of the folder that the host shares with dom0, and its place there.
pub const SHARE: &str = "share";
/// Port at which a domU's agent listens.
const PORT: u16 = 7;
/// Seconds that the start of a daemon may take.
const START: u64 = 60;
/// Interval at which dom0 checks whether a domU is there.
const RETRY: Duration = Duration::from_millis(400);

/// Runs process 1 of either.
///
/// # Errors
/// The domain cannot be prepared.
pub fn serve() -> Result<()> {
    prepare()?;
    let mut modules: Vec<_> = fs::read_dir("/modules")?.flatten().map(|entry| entry.path()).collect();
    modules.sort();
    for module in modules {
        load_module(&module.to_string_lossy())?;
    }
    mount("xenfs", "/proc/xen", "xenfs", MountFlags::empty(), None).context("/proc/xen")?;
    busybox(&["ip", "link", "set", "lo", "up"])?;
    match std::env::var(ADDRESS) {
        Ok(address) => domu(&address),
        Err(_) => dom0(),
    }
}

fn domu(address: &str) -> Result<()> {
    if fs::exists("/sys/class/net/eth0")? {
        busybox(&["ip", "addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
        busybox(&["ip", "link", "set", "eth0", "up"])?;
    }
    for line in TcpListener::bind(("0.0.0.0", PORT))?.incoming() {
        let line = line?;
        line.set_nodelay(true)?;
        thread::spawn(move || line.try_clone().context("line").and_then(|out| answer(line, out)));
    }
    Ok(())
}

fn dom0() -> Result<()> {
    let nine: &CStr = c"trans=virtio,version=9p2000.L,msize=131072";
    for (source, kind, target, data) in [
        ("devpts", "devpts", "/dev/pts", None),
        ("shm", "tmpfs", "/dev/shm", None),
        ("run", "tmpfs", "/run", None),
        (SHARE, "9p", "/share", Some(nine)),
    ] {
        fs::create_dir_all(target)?;
        mount(source, target, kind, MountFlags::empty(), data).context(target)?;
    }
    for folder in ["/run/xen", "/run/xenstored", "/run/lock"] {
        fs::create_dir_all(folder)?;
    }
    busybox(&["brctl", "addbr", BRIDGE])?;
    busybox(&["ip", "addr", "add", &format!("{NETWORK}.254/24"), "dev", BRIDGE])?;
    busybox(&["ip", "link", "set", BRIDGE, "up"])?;
    command("/bin/xenstored", &["--pid-file", "/run/xenstored.pid"])?;
    until(within(START), || fs::exists("/run/xenstored/socket").unwrap_or(false)).context("xenstored")?;
    command("/bin/xen-init-dom0", &[])?;
    command("/bin/xenconsoled", &["--pid-file=/run/xenconsoled.pid", "--log=all", "--log-dir=/var/log/xen/console"])?;
    command("/bin/busybox", &["httpd", "-p", "80", "-h", "/share"])?;
    for (name, port) in ports()? {
        thread::spawn(move || relay(&name, &port));
    }
    let line = open_raw("/dev/ttyS1")?;
    answer(line.try_clone()?, line)
}

/// Returns the virtio-serial ports: the host's names for them, and their devices.
fn ports() -> Result<Vec<(String, String)>> {
    let entries = fs::read_dir("/sys/class/virtio-ports")?.flatten();
    let name = |entry: fs::DirEntry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        Some((name.trim().to_owned(), format!("/dev/{}", entry.file_name().to_string_lossy())))
    };
    Ok(entries.filter_map(name).collect())
}

/// Returns the address of the domU in a slot: 1, 2…
#[must_use]
pub fn address_of(place: &str) -> String {
    format!("{NETWORK}.{place}")
}

/// Returns the path of the file with the number of the domain in a slot.
fn occupant(place: &str) -> String {
    format!("/run/place-{place}")
}

/// Connects a port, which has the name of a slot, to the agents of the domUs that come and go there.
fn relay(place: &str, device: &str) -> Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(device).context(device)?;
    let address = format!("{}:{PORT}", address_of(place)).parse()?;
    let current: Arc<Mutex<Option<TcpStream>>> = Arc::default();
    let (mut requests, for_requests) = (port.try_clone()?, Arc::clone(&current));
    thread::spawn(move || {
        let mut out = Switched(for_requests);
        copy(&mut requests, &mut out)
    });
    let set = |line| *current.lock().unwrap_or_else(PoisonError::into_inner) = line;
    loop {
        let domain = fs::read(occupant(place)).ok();
        let line = domain.as_ref().and_then(|_| TcpStream::connect_timeout(&address, RETRY).ok());
        let Some(line) = line else {
            _ = until(Instant::now() + RETRY / 4, || false);
            continue;
        };
        line.set_nodelay(true)?;
        line.set_read_timeout(Some(RETRY))?;
        set(Some(line.try_clone()?));
        // Ends the incomplete line of the last domU.
        (&port).write_all(b"\n")?;
        let mut bytes = [0; 1 << 14];
        loop {
            match (&line).read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => (&port).write_all(&bytes[..n])?,
                // A domain that was destroyed does not close the connection.
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if fs::read(occupant(place)).ok() != domain {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        set(None);
    }
}

/// Writes to the current connection, and discards the bytes while there is none.
struct Switched(Arc<Mutex<Option<TcpStream>>>);

impl Write for Switched {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Some(line) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            _ = line.write_all(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Puts the network interface of the new domU in a slot on the bridge, and informs its driver. Runs in dom0, where no
/// script does so.
///
/// # Errors
/// The interface does not appear.
pub fn plug(place: &str, domid: &str) -> Result<()> {
    let interface = format!("vif{domid}.0");
    let path = format!("/sys/class/net/{interface}");
    until(within(START), || fs::exists(&path).unwrap_or(false)).context(&interface)?;
    busybox(&["brctl", "addif", BRIDGE, &interface])?;
    busybox(&["ip", "link", "set", &interface, "up"])?;
    let status = format!("/local/domain/0/backend/vif/{domid}/0/hotplug-status");
    command("/bin/xenstore-write", &[&status, "connected"])?;
    fs::write(occupant(place), domid).context(place)
}

fn busybox(args: &[&str]) -> Result<()> {
    command("/bin/busybox", args)
}

fn command(program: &str, args: &[&str]) -> Result<()> {
    let said = File::create("/tmp/said")?;
    let mut command = Command::new(program);
    let status = command.args(args).env("PATH", "/bin").stdout(said.try_clone()?).stderr(said).status();
    let status = status.context(program)?;
    let said = || fs::read_to_string("/tmp/said").map_err(Error::from);
    ensure!(status.success(), "{program} {args:?}: {status}: {}", said()?);
    Ok(())
}
