// Pages of any format -> coded pages: opened, scored, merged where heads get fewer entries, centred, reduced, quantised,
// packed. One task is one page and head.
#include <iterator>

#include "merge.h"
#include "scorer.h"

namespace csa2 {
namespace {

// Buffers of one thread, for one page and head; grown when a larger page comes.
struct Workspace {
  float *keys, *values;  // rows (entries, pad)
  float *columns, *spare, *queries, *logits, *bias, *share, *importance, *line, *hidden;
  MergeBuffers merge;

  void allocate(Scratch& scratch, int most_entries, int pad, int num_queries, int64_t hidden_size) {
    const int64_t padded = round_up(most_entries, kLanes), rows = padded * pad;
    const int64_t spare_rows = std::max<int64_t>(padded, pad) + kLanes;
    const int64_t sizes[] = {rows, rows, rows, 2 * spare_rows * kLanes, static_cast<int64_t>(num_queries) * pad,
                             num_queries * padded, padded, padded, padded, 2 * padded,
                             rows, rows, rows, padded * padded, padded, padded, padded, rows, padded, padded, hidden_size};
    float** const parts[] = {&keys, &values, &columns, &spare, &queries, &logits, &bias, &share, &importance, &line,
                             &merge.centred, &merge.columns, &merge.pivots, &merge.products, &merge.squares, &merge.weight,
                             &merge.mass, &merge.sums, &kept_, &owner_, &hidden};
    int64_t total = 0;
    for (const int64_t size : sizes) total += round_up(static_cast<int>(size), kLanes);
    float* at = scratch.get<float>(total);
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = at;
      at += round_up(static_cast<int>(sizes[i]), kLanes);
    }
    merge.kept = reinterpret_cast<int*>(kept_);
    merge.owner = reinterpret_cast<int*>(owner_);
  }

 private:
  float *kept_, *owner_;
};

class Sealer {
 public:
  Sealer(const SealArgs& args, Workspace& work)
      : args_(args), work_(work), d_(args.head_dim), pad_(round_up(args.head_dim, kLanes)),
        bases_{args.flat, args.hadamard, args.reduced, args.reduced_t, args.reduced_channels} {}

  void run(const PageMove& move, int head) {
    head_ = head;
    const HeadPiece& source = args_.pieces[move.source * args_.heads + head];
    const HeadPiece& target = args_.pieces[move.target * args_.heads + head];
    const uint8_t* base = args_.arena + move.offset;
    entries_ = static_cast<int>(source.entries);
    const int groups = static_cast<int>(target.entries);
    const bool merges = groups < entries_;
    open(source, base, merges);
    const bool sampled = move.sample >= 0;
    if (sampled) look(move.sample);
    if (merges) {
      if (!sampled)
        share_by_size(work_.keys, pad_, work_.bias, entries_, args_.rule.equal_sizes, work_.line, work_.share);
      merge(groups, sampled);
    }
    sampled_ = sampled && normalise();
    uint8_t* out = args_.out + move.out_offset;
    const int64_t end = target.bias >= 0 ? target.bias + target.entries : target.v_mean + d_;
    std::memset(out + target.k_codes, 0, (end + kLineBytes - 1) / kLineBytes * kLineBytes - target.k_codes);
    put_keys(target, out);
    to_columns(work_.values, round_up(entries_, kLanes), pad_, work_.columns);
    put_values(target, out);
    if (target.bias >= 0)
      for (int e = 0; e < entries_; ++e)
        out[target.bias + e] = static_cast<uint8_t>(
            bits_as<uint32_t>(clamped(work_.bias[e] / kBiasStep, 0.0f, 255.0f) + kRounder) & 255u);
  }

 private:
  // Keys as columns and, if wanted, as rows; values as rows; biases.
  void open(const HeadPiece& piece, const uint8_t* base, bool key_rows) {
    const int padded = round_up(entries_, kLanes);
    const int64_t size = static_cast<int64_t>(padded) * pad_;
    if (piece.basis == kModel) {
      plain_rows(base + piece.k_codes, args_.dtype, entries_, d_, pad_, work_.keys);
      plain_rows(base + piece.v_codes, args_.dtype, entries_, d_, pad_, work_.values);
      make_finite(work_.keys, size);
      make_finite(work_.values, size);
      to_columns(work_.keys, padded, pad_, work_.columns);
    } else {
      coded_values(piece, base, d_, pad_, bases_, work_.spare, work_.values, work_.columns);
      to_rows(work_.columns, padded, pad_, work_.values);
      make_finite(work_.values, size);
      coded_keys(piece, base, d_, pad_, bases_, work_.spare, work_.columns);
      make_finite(work_.columns, size);
      if (key_rows) to_rows(work_.columns, padded, pad_, work_.keys);
    }
    for (int e = 0; e < padded; ++e)
      work_.bias[e] = piece.bias >= 0 && e < entries_ ? base[piece.bias + e] * kBiasStep : 0.0f;
  }

  // The logits of the sample, and the share of attention that each entry draws.
  void look(int64_t sample) {
    const int rows = static_cast<int>(args_.num_queries), padded = round_up(entries_, kLanes);
    const char* from = static_cast<const char*>(args_.queries) +
                       (sample * args_.heads + head_) * rows * d_ * dtype_bytes(args_.query_dtype);
    if (from != seen_) to_rows_of(from, rows);
    seen_ = from;
    matmul_vector<StepF32>(reinterpret_cast<const uint32_t*>(work_.queries), pad_, rows,
                           reinterpret_cast<const Line*>(work_.columns), pad_, d_, padded / kLanes, work_.logits, padded, false);
    stride_ = padded;
    mean_softmax(work_.logits, stride_, rows, work_.bias, entries_, work_.line, work_.share);
  }

  void to_rows_of(const char* from, int rows) {
    const int64_t bytes = d_ * dtype_bytes(args_.query_dtype);
    for (int r = 0; r < rows; ++r) to_float(from + r * bytes, args_.query_dtype, d_, work_.queries + static_cast<int64_t>(r) * pad_);
  }

  void merge(int groups, bool sampled) {
    for (int e = 0; e < entries_; ++e)
      work_.importance[e] = work_.share[e] * norm_of(work_.values + static_cast<int64_t>(e) * pad_, pad_);
    if (sampled && args_.scorer.rows && !has_bias()) {
      to_columns(work_.values, round_up(entries_, kLanes), pad_, work_.merge.columns);
      correct_scores(args_.scorer, head_, work_.columns, work_.merge.columns, work_.share, entries_, d_, pad_, work_.hidden,
                     work_.importance);
    }
    merge_rows(work_.keys, work_.values, work_.bias, work_.importance, entries_, groups, pad_, args_.rule, work_.merge);
    entries_ = groups;
    to_columns(work_.keys, round_up(groups, kLanes), pad_, work_.columns);
    if (!sampled) return;
    // Groups keep the keys of their pivots, and so their logits.
    const int rows = static_cast<int>(args_.num_queries);
    for (int r = 0; r < rows; ++r) {
      float* row = work_.logits + r * stride_;
      for (int p = 0; p < groups; ++p) row[p] = row[work_.merge.kept[p]];
    }
    mean_softmax(work_.logits, stride_, rows, work_.bias, groups, work_.line, work_.share);
  }

  // Whether entries are merged already.
  bool has_bias() const {
    for (int e = 0; e < entries_; ++e)
      if (work_.bias[e] != 0.0f) return true;
    return false;
  }

  // Makes shares add up to 1; false if all are 0.
  bool normalise() {
    float total = 0.0f;
    for (int e = 0; e < entries_; ++e) total += work_.share[e];
    if (!(total > 0.0f)) return false;
    scale_row(work_.share, round_up(entries_, kLanes), 1.0f / total);
    return true;
  }

  // Subtracts the mean of the columns, as it is stored at `out`.
  void centre(bool even, uint8_t* out) {
    const int padded = round_up(entries_, kLanes);
    for (int c = 0; c < d_; ++c) {
      vf sum = vset1(0.0f);
      for (int e = 0; e < padded; e += kLanes) {
        const vf x = vload(work_.columns + static_cast<int64_t>(e) * pad_ + c * kLanes);
        sum = even ? vadd(sum, vkeep_first(x, entries_ - e, 0.0f)) : vfma(x, vload(work_.share + e), sum);
      }
      out[c] = static_cast<uint8_t>(encode_e4m3<uint32_t>(even ? vsum(sum) / static_cast<float>(entries_) : vsum(sum)));
      const vf mean = vset1(code_tables().e4m3[out[c]]);
      for (int e = 0; e < padded; e += kLanes) {
        float* at = work_.columns + static_cast<int64_t>(e) * pad_ + c * kLanes;
        vstore(at, vsub(vload(at), mean));
      }
    }
  }

  void put_keys(const HeadPiece& piece, uint8_t* out) {
    const int padded = round_up(entries_, kLanes), blocks = padded / kLanes;
    if (piece.basis == kFlat) through_flat(work_.columns, padded, pad_, d_, bases_, work_.spare);
    if (piece.channel_scales) return put_key_channels(piece, out);
    centre(!sampled_, out + piece.k_mean);
    for (int b = 0; b < blocks; ++b) {
      float* rows = work_.columns + static_cast<int64_t>(b) * pad_ * kLanes;
      const int valid = entries_ - b * kLanes;
      if (piece.basis == kReduced) {
        const float* matrix = bases_.reduced_t + piece.basis_row * bases_.reduced_channels * d_;
        times_columns(matrix, d_, static_cast<int>(piece.channels), d_, rows, work_.spare);
        rows = work_.spare;
      }
      for (int c = 0; c < piece.num_classes; ++c) {
        const int channels = static_cast<int>(piece.class_channels[c]);
        scale_entries(rows, channels, piece.class_kind[c], valid, out + piece.k_scales + c * entries_ + b * kLanes);
        pack_codes(piece.class_kind[c], rows, kLanes, channels, valid, blocks, b, out + piece.class_offset[c]);
        rows += channels * kLanes;
      }
    }
  }

  // A midpoint and a scale per channel. Scales are rounded up, so that no extreme is clipped.
  void put_key_channels(const HeadPiece& piece, uint8_t* out) {
    const int padded = round_up(entries_, kLanes), blocks = padded / kLanes;
    const int64_t kind = piece.class_kind[0];
    for (int c = 0; c < d_; ++c) {
      vf high = vset1(-FLT_MAX), low = vset1(-FLT_MAX);
      for (int e = 0; e < padded; e += kLanes) {
        const vf x = vload(work_.columns + static_cast<int64_t>(e) * pad_ + c * kLanes);
        high = vmax(high, vkeep_first(x, entries_ - e, -FLT_MAX));
        low = vmax(low, vkeep_first(vsub(vset1(0.0f), x), entries_ - e, -FLT_MAX));
      }
      const float top = vtop(high), bottom = -vtop(low);
      out[piece.k_mean + c] = static_cast<uint8_t>(encode_e4m3<uint32_t>((top + bottom) / 2));
      const float mean = code_tables().e4m3[out[piece.k_mean + c]];
      const uint8_t scale = encode_ue5m3(std::max(std::fabs(top - mean), std::fabs(bottom - mean)) / code_top(kind), true);
      out[piece.k_scales + c] = scale;
      const vf by = vset1(1.0f / decode_ue5m3(scale));
      for (int e = 0; e < padded; e += kLanes) {
        float* at = work_.columns + static_cast<int64_t>(e) * pad_ + c * kLanes;
        vstore(at, vmul(vsub(vload(at), vset1(mean)), by));
      }
    }
    for (int b = 0; b < blocks; ++b)
      pack_codes(kind, work_.columns + static_cast<int64_t>(b) * pad_ * kLanes, kLanes, d_, entries_ - b * kLanes, blocks, b,
                 out + piece.class_offset[0]);
  }

  void put_values(const HeadPiece& piece, uint8_t* out) {
    const int padded = round_up(entries_, kLanes);
    through_flat(work_.columns, padded, pad_, d_, bases_, work_.spare);
    if (sampled_) centre(false, out + piece.v_mean);
    for (int e = 0; e < padded; e += kLanes)
      scale_entries(work_.columns + static_cast<int64_t>(e) * pad_, d_, piece.v_kind, entries_ - e, out + piece.v_scales + e);
    to_rows(work_.columns, padded, pad_, work_.values);
    for (int b = 0; b < pad_ / kLanes; ++b)
      pack_codes(piece.v_kind, work_.values + b * kLanes, pad_, entries_, d_ - b * kLanes, pad_ / kLanes, b, out + piece.v_codes);
  }

  // Stores a scale for each of the first `valid` lanes of (channels, 16), and divides by them.
  void scale_entries(float* rows, int channels, int64_t kind, int valid, uint8_t* out) {
    const vf zero = vset1(0.0f);
    vf size = zero;
    for (int c = 0; c < channels; ++c) {
      const vf x = vload(rows + c * kLanes);
      size = kind == kLloyd2 ? vfma(x, x, size) : vmax(size, vmax(x, vsub(zero, x)));
    }
    float sizes[kLanes], inverse[kLanes] = {};
    vstore(sizes, size);
    for (int i = 0; i < kLanes && i < valid; ++i) {
      const float scale = kind == kLloyd2 ? std::sqrt(sizes[i] / static_cast<float>(channels)) : sizes[i] / code_top(kind);
      out[i] = encode_ue5m3(scale, false);
      inverse[i] = 1.0f / decode_ue5m3(out[i]);
    }
    const vf by = vload(inverse);
    for (int c = 0; c < channels; ++c) vstore(rows + c * kLanes, vmul(vload(rows + c * kLanes), by));
  }

  const SealArgs& args_;
  Workspace& work_;
  const int d_, pad_;
  const BasisRows bases_;
  int head_ = 0, entries_ = 0;
  const char* seen_ = nullptr;  // the sample that `queries` holds
  int64_t stride_ = 0;
  bool sampled_ = false;
};

}  // namespace

void seal(const SealArgs& args) {
  int most = kLanes;
  for (int64_t i = 0; i < args.num_moves; ++i)
    for (int head = 0; head < args.heads; ++head)
      most = std::max(most, static_cast<int>(args.pieces[args.moves[i].source * args.heads + head].entries));
  const int64_t tasks = args.num_moves * args.heads;
  const int threads = static_cast<int>(std::min<int64_t>(args.threads, tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Scratch scratch;
    Workspace work;
    work.allocate(scratch, most, round_up(args.head_dim, kLanes), static_cast<int>(args.num_queries),
                  hidden_floats(args.scorer, round_up(most, kLanes)));
    Sealer sealer(args, work);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tasks; ++i)  // head by head: pages share the queries of their sample
      sealer.run(args.moves[i % args.num_moves], static_cast<int>(i / args.num_moves));
  }
}

}  // namespace csa2
