// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats sizes for people.

/// Returns `bytes` with a unit, and at most one decimal place.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, shift)) = units.into_iter().find(|(_, shift)| bytes >> shift != 0) else {
        return format!("{bytes} B");
    };
    let tenths = ((bytes >> (shift - 10)) * 10) >> 10;
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        tenth => format!("{}.{tenth} {unit}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        let all = [0, 1023, 1024, 1536, 1 << 20, (512 << 20) + 1, 5 << 29, u64::MAX].map(bytes);
        assert_eq!(all, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 MiB", "512 MiB", "2.5 GiB", "17179869183.9 GiB"]);
    }
}
