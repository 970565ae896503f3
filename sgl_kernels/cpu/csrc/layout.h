// How a page is laid out for one (layer, head): a row of the table that `sgl_kernels/cpu/tables.py` makes. The binary
// contract itself is described in `sgl_kernels/page_layout.py`.
#pragma once

#include <cstdint>

namespace csa2 {

enum Basis : int64_t { kModel = 0, kFlat = 1, kIdentity = 2, kReduced = 3 };
enum Codes : int64_t { kPlain = 0, kE4M3 = 1, kE2M1 = 2, kInt4 = 3, kInt4A = 4, kLloyd2 = 5 };

constexpr int kMaxClasses = 4;
constexpr int kPieceFields = 28;
constexpr int kLineBytes = 64;
constexpr float kBiasStep = 1.0f / 16;  // nat

// Offsets are bytes from the start of the page; -1 where a part does not exist.
struct HeadPiece {
  int64_t basis, entries;
  int64_t k_codes, v_codes, k_scales, v_scales, k_mean, v_mean, bias;  // of a plain page: k_codes and v_codes, rows
  int64_t v_kind;
  int64_t channel_scales;  // whether keys have a scale per channel instead of one per class and entry
  int64_t basis_lines;     // of a reduced head: where its columns start in the buffer of reduced bases, in floats
  int64_t channels;        // C: all classes together
  int64_t num_classes;
  int64_t class_kind[kMaxClasses];
  int64_t class_channels[kMaxClasses];
  int64_t class_offset[kMaxClasses];  // of the codes of a class, from the start of the page
  int64_t basis_row;  // of a reduced head: which of the reduced bases is its own
  int64_t reserved;
};
static_assert(sizeof(HeadPiece) == kPieceFields * sizeof(int64_t));

// One page of a plan.
struct PageRef {
  int64_t format, offset, length;
};

// Tables indexed by a code byte or a code; filled once.
struct CodeTables {
  float e4m3[256];
  float ue5m3[256];
  float nibble[3][16];  // e2m1, int4, int4a
  float lloyd2[16];     // four times over
  CodeTables();
};
const CodeTables& code_tables();

// Value of each code; 256 of them for E4M3, else 16.
inline const float* code_values(int64_t kind) {
  const CodeTables& t = code_tables();
  if (kind == kE4M3) return t.e4m3;
  return kind == kLloyd2 ? t.lloyd2 : t.nibble[kind - kE2M1];
}

inline constexpr int code_bits(int64_t kind) { return kind == kE4M3 ? 8 : (kind == kLloyd2 ? 2 : 4); }

}  // namespace csa2
