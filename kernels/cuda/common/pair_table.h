// The size of the table of pairs that codes of a table of 16 are looked up in: host and device.
//
// It has all pairs of two codes, so that one look-up brings two weights, and a copy of each for
// every lane, 4 bytes in the lane's own bank of shared memory, so that no two lanes meet.
#pragma once

namespace awqd::cuda {

inline constexpr int kPairTableRow = 32 * 4;  // bytes: the copies of one pair
inline constexpr int kPairTableBytes = 256 * kPairTableRow;

}  // namespace awqd::cuda
