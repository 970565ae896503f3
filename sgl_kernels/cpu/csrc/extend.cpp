// Attention of new tokens over the pages before them and causally over themselves.
//
// A task is a range of rows (token, query head of the group) of one KV head, and a range of the prefix. It opens a chunk of
// entries at a time into a workspace and runs all its rows over it. Pages with values in the flat basis come first; their
// sum is turned back once, then plain pages and the new tokens follow. Online softmax is as in FlashAttention (Dao 2023).

#include <algorithm>
#include <cmath>
#include <vector>

#include "decode_page.h"
#include "kernels.h"
#include "open.h"
#include "softmax.h"

namespace csa2 {
namespace {

constexpr int kMaxRows = 768;  // rows of a task; a multiple of kRowBlock
#if defined(__AMX_BF16__)
constexpr int kRowBlock = 32;
#else
constexpr int kRowBlock = 48;
#endif
constexpr int kTasksPerThread = 2;
constexpr int64_t kMinSplitPages = 4;  // a part of a prefix shorter than this is not worth its own pass over the queries

struct Task {
  int64_t request;
  int head;
  int64_t row_begin, row_end;
  int64_t page_begin, page_end;
  bool new_tokens;   // whether the new tokens belong to this part
  int64_t partial;   // where its rows start in the buffer of partial results, or -1
};

struct Partials {
  std::vector<float> out, top, mass;
  int pad = 0;
};

struct ThreadScratch {
  Scratch query, mean, out, flat, reduced, state, logits, weights, chunk, rows;
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  DecodeOperand operand;
  DecodeBuffers decode[kDecodePages];
#endif
};

template <class Step>
class Runner {
 public:
  using Elem = typename Step::elem;

  Runner(const AttentionArgs& args, ThreadScratch& scratch) : args_(args), scratch_(scratch) {
    pad_ = round_up(args.head_dim, kLanes);
    repeat_ = args.heads / args.kv_heads;
    steps_ = key_steps<Step>(args.head_dim);
    scale_log2_ = args.scale * kLog2E;
    chunk_.allocate<Step>(scratch.chunk, args.head_dim, args.head_dim);
  }

  // Leaves the rows' state in `state()`.
  void run(const Task& task) {
    begin(task);
    int64_t page = task.page_begin;
    bool in_flat = false;
    while (page < task.page_end) {
      const PageRef& first = args_.pages[page];
      const HeadPiece& piece = args_.pieces[first.format * args_.kv_heads + task.head];
      const bool plain = piece.basis == kModel;
      if (plain && in_flat) leave_flat_basis();
      in_flat = !plain;
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
      if (decodes_directly(task, piece)) {
        page = decode_pages(task, page, piece);
        continue;
      }
#endif
      page = open_chunk(task, page, piece);
      if (piece.basis == kFlat)
        attend(task, flat_rows(), flat_mean_, -1);
      else if (piece.basis == kReduced)
        attend(task, reduced_rows(piece), model_mean_, -1);
      else
        attend(task, model_rows_, model_mean_, -1);
    }
    if (in_flat) leave_flat_basis();
    if (task.new_tokens) attend_new_tokens(task);
  }

  void write(const Task& task) const {
    const RequestRef& request = args_.requests[task.request];
    for (int64_t i = 0; i < rows_; ++i)
      write_row(args_, request, task.head, task.row_begin + i, state_.out + i * pad_, state_.top[i], state_.mass[i]);
  }

  void save(const Task& task, Partials& partials) const {
    std::memcpy(partials.out.data() + task.partial * pad_, state_.out, rows_ * pad_ * sizeof(float));
    std::memcpy(partials.top.data() + task.partial, state_.top, rows_ * sizeof(float));
    std::memcpy(partials.mass.data() + task.partial, state_.mass, rows_ * sizeof(float));
  }

  static void write_row(const AttentionArgs& args, const RequestRef& request, int head, int64_t row, const float* out,
                        float top, float mass) {
    const int repeat = args.heads / args.kv_heads;
    const int64_t at = (request.token_begin + row / repeat) * args.heads + head * repeat + row % repeat;
    char* target = static_cast<char*>(args.out) + at * args.head_dim * dtype_bytes(args.dtype);
    const float inverse = mass > 0.0f ? 1.0f / mass : 0.0f;
    int c = 0;
    if (args.dtype == kBf16)
      for (; c + kLanes <= args.head_dim; c += kLanes)
        vstore_bf16(reinterpret_cast<bf16_t*>(target) + c, vmul(vload(out + c), vset1(inverse)));
    for (; c < args.head_dim; ++c) store_scalar(target, args.dtype, c, out[c] * inverse);
    if (args.lse) args.lse[at] = (top + std::log2(mass)) * kLn2;
  }

 private:
  void begin(const Task& task) {
    rows_ = task.row_end - task.row_begin;
    const int64_t room = round_up(static_cast<int>(rows_), kRowBlock);
    const int64_t width = steps_ * Step::kPer;
    Elem* operands = scratch_.query.get<Elem>(2 * room * width);
    model_operand_ = operands;
    flat_operand_ = operands + room * width;
    model_rows_ = reinterpret_cast<const uint32_t*>(model_operand_);
    float* means = scratch_.mean.get<float>(2 * room * pad_);
    model_mean_ = means;
    flat_mean_ = means + room * pad_;
    have_flat_ = false;
    reduced_piece_ = decoded_piece_ = nullptr;
    const RequestRef& request = args_.requests[task.request];
    const int64_t bytes = dtype_bytes(args_.dtype);
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = task.row_begin + i;
      const int64_t at = (request.token_begin + row / repeat_) * args_.query_stride +
                         (task.head * repeat_ + row % repeat_) * static_cast<int64_t>(args_.head_dim);
      const char* source = static_cast<const char*>(args_.query) + at * bytes;
      float* mean = model_mean_ + i * pad_;
      to_float(source, args_.dtype, args_.head_dim, mean);
      std::fill(mean + args_.head_dim, mean + pad_, 0.0f);
      fill_operand(mean, model_operand_ + i * width);
    }
    state_.pad = pad_;
    state_.out = scratch_.out.get<float>(room * pad_);
    state_.top = scratch_.state.get<float>(2 * room);
    state_.mass = state_.top + room;
    std::fill(state_.out, state_.out + room * pad_, 0.0f);
    std::fill(state_.top, state_.top + room, kNothing);
    std::fill(state_.mass, state_.mass + room, 0.0f);
  }

  void fill_operand(const float* row, Elem* operand) const {
    narrow(row, args_.head_dim, operand);
    for (int c = args_.head_dim; c < steps_ * Step::kPer; ++c) operand[c] = Elem{};
  }

  // (rows, pad) times the flat basis, which is its own inverse.
  void times_basis(const float* in, float* out) const {
    matmul<StepF32>(reinterpret_cast<const uint32_t*>(in), pad_, static_cast<int>(rows_),
                    reinterpret_cast<const Line*>(args_.basis_lines), args_.head_dim, args_.head_dim, pad_ / kLanes, out, pad_,
                    false);
  }

  const uint32_t* flat_rows() {
    if (!have_flat_) {
      times_basis(model_mean_, flat_mean_);
      for (int64_t i = 0; i < rows_; ++i) fill_operand(flat_mean_ + i * pad_, flat_operand_ + i * steps_ * Step::kPer);
      have_flat_ = true;
    }
    return reinterpret_cast<const uint32_t*>(flat_operand_);
  }

  // (rows, round_up(C, 16)) fp32: the query times the columns of a reduced head.
  const float* times_columns(const HeadPiece& piece) {
    const int pad = round_up(static_cast<int>(piece.channels), kLanes);
    float* turned = scratch_.flat.get<float>(rows_ * pad);
    matmul<StepF32>(reinterpret_cast<const uint32_t*>(model_mean_), pad_, static_cast<int>(rows_),
                    reinterpret_cast<const Line*>(args_.reduced_lines + piece.basis_lines), args_.head_dim, args_.head_dim,
                    pad / kLanes, turned, pad, false);
    return turned;
  }

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  bool decodes_directly(const Task& task, const HeadPiece& piece) const {
    const RequestRef& request = args_.requests[task.request];
    return request.token_end - request.token_begin == 1 && args_.dtype == kBf16 && rows_ <= kDecodeRows &&
           csa2::decodes_directly(piece);
  }

  // Reads pages of one format from `page` on; the first page that is left.
  int64_t decode_pages(const Task& task, int64_t page, const HeadPiece& piece) {
    const int64_t format = args_.pages[page].format;
    const int most = piece.basis == kModel || piece.channel_scales ? 1 : kDecodePages;
    const uint8_t* bases[kDecodePages];
    int64_t ahead[kDecodePages];
    int count = 0;
    for (; count < most && page + count < task.page_end && args_.pages[page + count].format == format; ++count) {
      const int64_t offset = args_.pages[page + count].offset, later = page + count + most;
      bases[count] = args_.arena + offset;
      ahead[count] = later < task.page_end && args_.pages[later].format == format ? args_.pages[later].offset - offset : 0;
    }
    const int rows = static_cast<int>(rows_);
    if (piece.basis == kModel) {
      decode_plain_page(bases[0] + piece.k_codes, bases[0] + piece.v_codes, static_cast<int>(args_.pages[page].length), ahead[0],
                        args_.head_dim, model_rows_, steps_, rows, scale_log2_, scratch_.decode[0], state_);
      return page + 1;
    }
    if (piece.basis == kFlat) flat_rows();
    if (piece.channel_scales) {
      float factors[256];
      decode_scales(bases[0] + piece.k_scales, args_.head_dim, factors);
      scratch_.operand.prepare(piece, piece.basis == kFlat ? flat_mean_ : model_mean_, pad_, rows, factors);
      decoded_piece_ = nullptr;
    } else if (decoded_piece_ != &piece) {
      if (piece.basis == kFlat) {
        scratch_.operand.prepare(piece, flat_mean_, pad_, rows, nullptr);
      } else {
        scratch_.operand.prepare(piece, times_columns(piece), round_up(static_cast<int>(piece.channels), kLanes), rows, nullptr);
      }
      decoded_piece_ = &piece;
    }
    decode_coded_pages(piece, bases, ahead, count, scratch_.operand, piece.basis == kFlat ? flat_mean_ : model_mean_,
                       args_.head_dim, rows, scale_log2_, scratch_.decode, state_);
    return page + count;
  }
#endif

  const uint32_t* reduced_rows(const HeadPiece& piece) {
    if (reduced_piece_ != &piece) {
      const int channels = static_cast<int>(piece.channels), pad = round_up(channels, kLanes);
      const int width = key_steps<Step>(channels) * Step::kPer;
      const float* turned = times_columns(piece);
      reduced_operand_ = scratch_.reduced.get<Elem>(round_up(static_cast<int>(rows_), kRowBlock) * width);
      for (int64_t i = 0; i < rows_; ++i) {
        narrow(turned + i * pad, channels, reduced_operand_ + i * width);
        for (int c = channels; c < width; ++c) reduced_operand_[i * width + c] = Elem{};
      }
      reduced_piece_ = &piece;
    }
    return reinterpret_cast<const uint32_t*>(reduced_operand_);
  }

  void leave_flat_basis() {
    float* turned = scratch_.flat.get<float>(rows_ * pad_);
    times_basis(state_.out, turned);
    std::memcpy(state_.out, turned, rows_ * pad_ * sizeof(float));
  }

  // Opens pages of one format from `page` on; the first page that is not in the chunk.
  int64_t open_chunk(const Task& task, int64_t page, const HeadPiece& piece) {
    const int64_t format = args_.pages[page].format;
    const PageSource source{args_.arena, &piece, args_.dtype, args_.head_dim, scale_log2_};
    chunk_.coded = piece.basis != kModel;
    chunk_.page_entries = round_up(static_cast<int>(piece.entries), kLanes);
    chunk_.value_means = piece.v_mean >= 0;
    chunk_.key_steps = chunk_.coded ? key_steps<Step>(static_cast<int>(piece.channels)) : steps_;
    int used = 0;
    for (; page < task.page_end && args_.pages[page].format == format && used + chunk_.page_entries <= kChunkEntries;
         ++page, used += chunk_.page_entries) {
      if (chunk_.coded)
        open_coded<Step>(source, args_.pages[page].offset, used, used / chunk_.page_entries, scratch_.rows, chunk_);
      else
        open_plain<Step>(source, args_.pages[page], used, chunk_);
    }
    chunk_.finish<Step>(used, pad_ / kLanes);
    return page;
  }

  void attend_new_tokens(const Task& task) {
    const RequestRef& request = args_.requests[task.request];
    const int64_t bytes = dtype_bytes(args_.dtype), dim = args_.head_dim;
    auto rows_of = [&](const void* data, int64_t stride) {
      return Rows{static_cast<const char*>(data) + (request.token_begin * stride + task.head * dim) * bytes, stride * bytes,
                  args_.dtype};
    };
    const Rows keys = rows_of(args_.keys, args_.key_stride), values = rows_of(args_.values, args_.value_stride);
    const int64_t seen = (task.row_end - 1) / repeat_ + 1;  // tokens up to that of the last row
    chunk_.coded = false;
    chunk_.page_entries = kLanes;
    chunk_.key_steps = steps_;
    for (int64_t first = 0; first < seen; first += kChunkEntries) {
      const int count = static_cast<int>(std::min<int64_t>(kChunkEntries, seen - first));
      const int used = open_rows<Step>(keys, values, first, count, count, args_.head_dim, scale_log2_, 0, chunk_);
      chunk_.finish<Step>(used, pad_ / kLanes);
      attend(task, model_rows_, model_mean_, first);
    }
  }

  // All rows over the chunk. `first_token`: new token of the first entry, or -1 if every row sees every entry.
  void attend(const Task& task, const uint32_t* operand, const float* mean_rows, int64_t first_token) {
    float* logits = scratch_.logits.get<float>(kRowBlock * kBlockEntries);
    Elem* weights = scratch_.weights.get<Elem>(kRowBlock * kBlockEntries);
    for (int64_t row = 0; row < rows_; row += kRowBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kRowBlock, rows_ - row));
      const int64_t first_seen = (task.row_begin + row) / repeat_, last_seen = (task.row_begin + row + count - 1) / repeat_;
      for (int from = 0; from < chunk_.entries; from += kBlockEntries) {
        if (first_token >= 0 && first_token + from > last_seen) break;
        const int n = std::min(kBlockEntries, chunk_.entries - from);
        const int steps = chunk_.key_steps;
        matmul<Step>(operand + row * steps, steps, count, chunk_.keys + static_cast<int64_t>(from / kLanes) * steps, steps,
                     steps, n / kLanes, logits, kBlockEntries, false);
        const bool limited = first_token >= 0 && first_token + from + n - 1 > first_seen;
        for (int i = 0; i < count; ++i) {
          float* s = logits + i * kBlockEntries;
          Elem* p = weights + i * kBlockEntries;
          const float* mean = mean_rows + (row + i) * pad_;
          if (limited) {
            const int limit = static_cast<int>((task.row_begin + row + i) / repeat_ - first_token - from + 1);
            softmax_row<Elem, false, true>(s, p, n, from, limit, mean, scale_log2_, chunk_, state_, row + i);
          } else if (chunk_.coded) {
            softmax_row<Elem, true, false>(s, p, n, from, n, mean, scale_log2_, chunk_, state_, row + i);
          } else {
            softmax_row<Elem, false, false>(s, p, n, from, n, mean, scale_log2_, chunk_, state_, row + i);
          }
        }
        matmul<Step>(reinterpret_cast<const uint32_t*>(weights), kBlockEntries / Step::kPer, count,
                     chunk_.values + from / Step::kPer, chunk_.value_stride, n / Step::kPer, pad_ / kLanes,
                     state_.out + row * pad_, pad_, true);
      }
    }
  }

  const AttentionArgs& args_;
  ThreadScratch& scratch_;
  Chunk chunk_;
  RowState state_{};
  int pad_, repeat_, steps_;
  int64_t rows_ = 0;
  float scale_log2_;
  Elem *model_operand_ = nullptr, *flat_operand_ = nullptr;
  const uint32_t* model_rows_ = nullptr;
  float *model_mean_ = nullptr, *flat_mean_ = nullptr;
  bool have_flat_ = false;
  Elem* reduced_operand_ = nullptr;
  const HeadPiece* reduced_piece_ = nullptr;  // whose columns `reduced_operand_` has
  const HeadPiece* decoded_piece_ = nullptr;  // for which the operand of decode is prepared
};

// Rows of every (request, head), and parts of the prefix where there are fewer rows than threads could take.
std::vector<Task> plan_tasks(const AttentionArgs& args, int64_t& partial_rows) {
  const int repeat = args.heads / args.kv_heads;
  int64_t ranges = 0;
  for (int64_t i = 0; i < args.num_requests; ++i) {
    const int64_t rows = (args.requests[i].token_end - args.requests[i].token_begin) * repeat;
    ranges += (rows + kMaxRows - 1) / kMaxRows * args.kv_heads;
  }
  const int64_t wanted = args.threads > 1 ? kTasksPerThread * args.threads : 1;
  const int64_t parts_wanted = ranges ? (wanted + ranges - 1) / ranges : 1;
  std::vector<Task> tasks;
  partial_rows = 0;
  for (int64_t i = 0; i < args.num_requests; ++i) {
    const RequestRef& request = args.requests[i];
    const int64_t rows = (request.token_end - request.token_begin) * repeat;
    const int64_t pages = request.page_end - request.page_begin;
    const int64_t parts = std::max<int64_t>(1, std::min(parts_wanted, pages / kMinSplitPages));
    for (int head = 0; head < args.kv_heads; ++head)
      for (int64_t row = 0; row < rows; row += kMaxRows)
        for (int64_t part = 0; part < parts; ++part) {
          Task task{i, head, row, std::min<int64_t>(row + kMaxRows, rows), 0, 0, part == parts - 1, -1};
          task.page_begin = request.page_begin + pages * part / parts;
          task.page_end = request.page_begin + pages * (part + 1) / parts;
          if (parts > 1) {
            task.partial = partial_rows;
            partial_rows += task.row_end - task.row_begin;
          }
          tasks.push_back(task);
        }
  }
  return tasks;
}

// Parts of the same rows follow each other in `tasks`.
template <class Step>
void merge_partials(const AttentionArgs& args, const std::vector<Task>& tasks, Partials& partials) {
  for (size_t first = 0; first < tasks.size();) {
    size_t end = first + 1;
    while (end < tasks.size() && !tasks[end - 1].new_tokens) ++end;
    if (tasks[first].partial >= 0) {
      const Task& task = tasks[first];
      const int64_t rows = task.row_end - task.row_begin;
      for (int64_t row = 0; row < rows; ++row) {
        float top = kNothing, mass = 0.0f;
        for (size_t t = first; t < end; ++t) top = std::max(top, partials.top[tasks[t].partial + row]);
        float* out = partials.out.data() + (task.partial + row) * partials.pad;
        for (size_t t = first; t < end; ++t) {
          const int64_t at = tasks[t].partial + row;
          const float weight = std::exp2(partials.top[at] - top);
          mass += weight * partials.mass[at];
          if (t == first)
            scale_row(out, partials.pad, weight);
          else
            add_scaled(out, partials.out.data() + at * partials.pad, partials.pad, weight);
        }
        Runner<Step>::write_row(args, args.requests[task.request], task.head, task.row_begin + row, out, top, mass);
      }
    }
    first = end;
  }
}

template <class Step>
void run_all(const AttentionArgs& args) {
  static thread_local Partials partials;
  int64_t partial_rows = 0;
  const std::vector<Task> tasks = plan_tasks(args, partial_rows);
  Partials& shared = partials;
  shared.pad = round_up(args.head_dim, kLanes);
  shared.out.resize(partial_rows * shared.pad);
  shared.top.resize(partial_rows);
  shared.mass.resize(partial_rows);
  const int threads = static_cast<int>(std::min<size_t>(args.threads, tasks.size()));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local ThreadScratch scratch;
    TileConfig tiles;
    Runner<Step> runner(args, scratch);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); ++i) {
      runner.run(tasks[i]);
      if (tasks[i].partial < 0)
        runner.write(tasks[i]);
      else
        runner.save(tasks[i], shared);
    }
  }
  if (partial_rows) merge_partials<Step>(args, tasks, shared);
}

}  // namespace

void extend_attention(const AttentionArgs& args) {
#if defined(__AVX512BF16__)
  if (args.dtype == kBf16) return run_all<StepBf16>(args);
#endif
  run_all<StepF32>(args);
}

}  // namespace csa2
