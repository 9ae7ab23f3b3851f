// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a virtual machine under QEMU needs besides: devices, the driver, memory that is cached, the broker.

use std::{fs, path::Path};

use super::findings::{Finding, Grade};
use crate::cmd::link;

/// The kernel module's name as a driver.
const DRIVER: &str = "tombolo_ivshmem";
/// Below this firmware has devices' memory uncached, which no driver can change.
const CACHED_FROM: u64 = 4 << 30;
/// The socket unless `TOMBOLO_BROKER` says otherwise.
const BROKER: &str = "/run/tombolo/broker.sock";

/// An ivshmem device on the PCI bus.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    pub address: String,
    /// Which driver has it.
    pub driver: Option<String>,
    /// It has interrupts: it is the doorbell, and not memory.
    pub is_bell: bool,
    /// Where its memory is.
    pub memory: u64,
}

/// What there is of it here.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Guest {
    pub devices: Vec<Device>,
    /// The module is loaded.
    pub module: bool,
    /// The broker's name for this machine, or why it does not answer; none: there are no devices to ask for.
    pub broker: Option<Result<String, String>>,
}

/// Looks at the machine whose sysfs is at `sys`.
pub fn probe(sys: &Path) -> Guest {
    let bus = sys.join("bus/pci");
    let entries = fs::read_dir(bus.join("devices")).into_iter().flatten().flatten();
    let mut devices: Vec<_> = entries.filter_map(|entry| device(&entry.path())).collect();
    devices.sort_by(|a, b| a.address.cmp(&b.address));
    let module = bus.join("drivers").join(DRIVER).is_dir();
    let named = std::env::var_os("TOMBOLO_BROKER").filter(|path| !path.is_empty());
    let socket = named.as_deref().map_or(Path::new(BROKER), Path::new);
    let broker = (!devices.is_empty()).then(|| link::name_of(socket).map_err(|error| error.to_string()));
    Guest { devices, module, broker }
}

fn device(folder: &Path) -> Option<Device> {
    let says = |file: &str, id: &str| fs::read_to_string(folder.join(file)).is_ok_and(|found| found.trim() == id);
    if !says("vendor", "0x1af4") || !says("device", "0x1110") {
        return None;
    }
    // A line for each window of the device: its first and last address and its kind.
    let windows = fs::read_to_string(folder.join("resource")).unwrap_or_default();
    let first = |number: usize| {
        let start = windows.lines().nth(number)?.split_whitespace().next()?.strip_prefix("0x")?;
        u64::from_str_radix(start, 16).ok()
    };
    let driver = fs::read_link(folder.join("driver")).ok();
    let driver = driver.and_then(|driver| Some(driver.file_name()?.to_string_lossy().into_owned()));
    let address = folder.file_name()?.to_string_lossy().into_owned();
    Some(Device { address, driver, is_bell: first(1).is_some_and(|at| at != 0), memory: first(2).unwrap_or(0) })
}

/// The devices and their driver.
pub fn ivshmem(guest: &Guest) -> Finding {
    let named =
        |devices: Vec<&Device>| devices.iter().map(|device| device.address.as_str()).collect::<Vec<_>>().join(", ");
    let those = |is: &dyn Fn(&Device) -> bool| guest.devices.iter().filter(|device| is(device)).collect::<Vec<_>>();
    let wrong = |says: String| Finding::new("ivshmem", Grade::Warning, says);
    if guest.devices.is_empty() {
        return Finding::new("ivshmem", Grade::Info, "ivshmem devices on the PCI bus: none");
    }
    if !guest.module {
        return wrong(format!("no driver for {}: the kernel module is not loaded", named(those(&|_| true))))
            .mend(format!("modprobe {DRIVER} (from kernel/ivshmem, by DKMS)"));
    }
    let other = those(&|device| device.driver.as_deref() != Some(DRIVER));
    if let Some(first) = other.first() {
        let (at, bus) = (&first.address, "/sys/bus/pci");
        let unbind = first.driver.as_ref().map(|_| format!("echo {at} > {bus}/devices/{at}/driver/unbind; "));
        return wrong(format!("the driver {DRIVER} has not {}", named(other))).mend(format!(
            "{}echo {at} > {bus}/drivers/{DRIVER}/bind; dmesg says why not",
            unbind.unwrap_or_default()
        ));
    }
    if !guest.devices.iter().any(|device| device.is_bell) {
        return wrong(format!("{}: memory, and no ivshmem-doorbell device to ring with", named(those(&|_| true))))
            .mend("`tombolo link snippet NAME` on the host says what QEMU needs");
    }
    let uncached = those(&|device| !device.is_bell && device.memory < CACHED_FROM);
    if !uncached.is_empty() {
        let says =
            format!("{} below 4 GiB, where firmware leaves memory uncached: it works and crawls", named(uncached));
        return wrong(says).mend("have the host plug it in once the machine is up, or make it 1 GiB large");
    }
    Finding::new("ivshmem", Grade::Ok, format!("the driver has {}", named(those(&|_| true))))
}

/// The broker of this machine.
pub fn broker(guest: &Guest) -> Finding {
    match &guest.broker {
        None => {
            Finding::new("broker", Grade::Info, "no ivshmem devices, so nothing for a broker of this machine to do")
        }
        Some(Ok(name)) => {
            Finding::new("broker", Grade::Ok, format!("the broker answers; this machine is called {name}"))
        }
        Some(Err(why)) => Finding::new("broker", Grade::Warning, format!("the broker does not answer: {why}"))
            .mend("systemctl start tombolod-guest, or: tombolod --guest"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(folder: &Path, id: &str, windows: &str) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("vendor"), "0x1af4\n").unwrap();
        fs::write(folder.join("device"), format!("{id}\n")).unwrap();
        fs::write(folder.join("resource"), windows).unwrap();
    }

    #[test]
    fn ivshmem_devices_are_told_from_others_and_from_each_other() {
        let sys = tempfile::tempdir().unwrap();
        let (bus, none) = (sys.path().join("bus/pci"), "0x0000000000000000 0x0000000000000000 0x0000000000000000\n");
        let (low, high) =
            ("0x00000000febd1000 0x00000000febd1fff 0x200\n", "0x000000c000000000 0xc000ffffff 0x14220c\n");
        put(&bus.join("devices/0000:00:05.0"), "0x1110", &[low, low, high].concat());
        put(&bus.join("devices/0000:00:06.0"), "0x1110", &[low, none, low].concat());
        put(&bus.join("devices/0000:00:07.0"), "0x1000", low);
        let driver = bus.join("drivers").join(DRIVER);
        fs::create_dir_all(&driver).unwrap();
        std::os::unix::fs::symlink(&driver, bus.join("devices/0000:00:05.0/driver")).unwrap();
        let guest = probe(sys.path());
        let device = |address: &str, driver: Option<&str>, is_bell, memory| Device {
            address: address.into(),
            driver: driver.map(Into::into),
            is_bell,
            memory,
        };
        let bell = device("0000:00:05.0", Some(DRIVER), true, 0xc0_0000_0000);
        assert_eq!(guest.devices, [bell, device("0000:00:06.0", None, false, 0xfebd_1000)]);
        assert!(guest.module && probe(Path::new("/nowhere")) == Guest::default());
        assert!(guest.broker.is_some_and(|broker| broker.is_err()));
    }
}
