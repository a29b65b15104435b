//! What is known of each byte of shared memory and of the operands, and what is wrong with an access.

use std::cell::Cell;
use std::ops::Range;

/// An operand of a kernel.
pub struct Operand<'a> {
    /// Cells: operands that are only read may overlap.
    pub bytes: &'a [Cell<u8>],
    /// Whether the kernel may read it before a thread has written it.
    pub initialised: bool,
}

/// A kernel's operands in order, through all its launches.
pub struct Memory<'a> {
    operands: Vec<Operand<'a>>,
    records: Vec<Vec<Element>>,
    launches: u32,
}

/// Bytes that are tracked as one, in operands and in shared memory.
const ELEMENT_BYTES: usize = 2;
const GRANULE_BYTES: usize = 2;

/// Who wrote an element of an operand last.
#[derive(Clone, Copy, Default)]
struct Element {
    written: bool,
    launch: u32,
    block: u32,
    thread: u32,
}

impl<'a> Memory<'a> {
    pub fn new(operands: Vec<Operand<'a>>) -> Self {
        let record = |o: &Operand| {
            let start = Element { written: o.initialised, ..Element::default() };
            vec![start; o.bytes.len().div_ceil(ELEMENT_BYTES)]
        };
        let records = operands.iter().map(record).collect();
        Self { operands, records, launches: 0 }
    }

    /// Begins a launch: gives the operands' addresses.
    pub(crate) fn begin(&mut self) -> Vec<*mut u8> {
        self.launches += 1;
        self.operands.iter().map(|o| o.bytes.as_ptr().cast_mut().cast()).collect()
    }

    /// The operand at an address, and how far into it.
    fn find(&self, address: usize, bytes: usize) -> Result<(usize, usize), String> {
        let mut nearest = (usize::MAX, String::from("outside of every operand"));
        for (i, operand) in self.operands.iter().enumerate() {
            let start = operand.bytes.as_ptr() as usize;
            let end = start + operand.bytes.len();
            if address >= start && address + bytes <= end {
                return Ok((i, address - start));
            }
            let (distance, place) =
                if address < start { (start - address, "before") } else { (address - end, "after") };
            if distance < nearest.0 {
                nearest = (distance, format!("{distance} bytes {place} operand {i}"));
            }
        }
        Err(nearest.1)
    }

    pub(crate) fn read(&mut self, address: usize, bytes: usize, block: u32) -> Result<(), String> {
        let (operand, at) = self.find(address, bytes).map_err(|place| format!("reads {bytes} bytes {place}"))?;
        for element in &self.records[operand][at / ELEMENT_BYTES..(at + bytes).div_ceil(ELEMENT_BYTES)] {
            if !element.written {
                return Err(format!("reads byte {at} of operand {operand}, which nothing has written"));
            }
            if element.launch == self.launches && element.block != block {
                return Err(format!("reads byte {at} of operand {operand}, which another block of the launch wrote"));
            }
        }
        Ok(())
    }

    pub(crate) fn write(&mut self, address: usize, bytes: usize, block: u32, thread: u32) -> Result<(), String> {
        let (operand, at) = self.find(address, bytes).map_err(|place| format!("writes {bytes} bytes {place}"))?;
        for element in &mut self.records[operand][at / ELEMENT_BYTES..(at + bytes).div_ceil(ELEMENT_BYTES)] {
            if element.launch == self.launches && (element.block, element.thread) != (block, thread) {
                return Err(format!("writes byte {at} of operand {operand}, which another thread of the launch wrote"));
            }
            *element = Element { written: true, launch: self.launches, block, thread };
        }
        Ok(())
    }
}

/// Shared memory of the block that runs.
pub struct Shared {
    arrays: Vec<(Range<usize>, Vec<Granule>)>,
    /// Counts blocks and barriers.
    block: u32,
    epoch: u32,
}

/// More than one thread read since the last barrier.
const MANY: u32 = u32::MAX;

#[derive(Clone, Copy, Default)]
struct Granule {
    /// The block that wrote it last.
    block: u32,
    writer: u32,
    written: u32,
    reader: u32,
    read: u32,
}

impl Shared {
    pub fn new(arrays: Vec<Range<usize>>) -> Self {
        let record = |r: Range<usize>| (r.clone(), vec![Granule::default(); r.len().div_ceil(GRANULE_BYTES)]);
        Self { arrays: arrays.into_iter().map(record).collect(), block: 0, epoch: 0 }
    }

    pub fn next_block(&mut self) {
        self.block += 1;
        self.epoch += 1;
    }

    pub fn next_epoch(&mut self) {
        self.epoch += 1;
    }

    /// The granules of an access; none outside of shared memory.
    fn find(&mut self, address: usize, bytes: usize) -> Result<&mut [Granule], String> {
        for (range, granules) in &mut self.arrays {
            if range.contains(&address) {
                let at = address - range.start;
                if address + bytes > range.end {
                    return Err(format!("{bytes} bytes from byte {at} of a shared array of {}", range.len()));
                }
                return Ok(&mut granules[at / GRANULE_BYTES..(at + bytes).div_ceil(GRANULE_BYTES)]);
            }
        }
        Err(format!("{bytes} bytes outside of every shared array"))
    }

    pub fn read(&mut self, address: usize, bytes: usize, thread: u32) -> Result<(), String> {
        let (block, epoch) = (self.block, self.epoch);
        for granule in self.find(address, bytes).map_err(|place| format!("reads {place}"))? {
            if granule.block != block {
                return Err("reads shared memory that no thread of the block has written".into());
            }
            if granule.written == epoch && granule.writer != thread {
                return Err(format!("reads what thread {} wrote, with no barrier between", granule.writer));
            }
            granule.reader = if granule.read == epoch && granule.reader != thread { MANY } else { thread };
            granule.read = epoch;
        }
        Ok(())
    }

    pub fn write(&mut self, address: usize, bytes: usize, thread: u32) -> Result<(), String> {
        let (block, epoch) = (self.block, self.epoch);
        for granule in self.find(address, bytes).map_err(|place| format!("writes {place}"))? {
            if granule.block == block && granule.written == epoch && granule.writer != thread {
                return Err(format!("writes what thread {} wrote, with no barrier between", granule.writer));
            }
            if granule.read == epoch && granule.reader != thread {
                return Err("writes what another thread read, with no barrier between".into());
            }
            (granule.block, granule.writer, granule.written) = (block, thread, epoch);
        }
        Ok(())
    }
}
