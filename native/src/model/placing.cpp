// Places the weights of a described model: in the mapping, in a device's memory or in the host's, and brings them there.
#include "model/weights.h"

#include "common/kernels.h"

#include <algorithm>
#include <cstring>

namespace luce {

// Takes a device's memory for the copies of what lies there.
void Model::place_copies(uint32_t stage) {
    if (copies_.empty() || ggml_get_first_tensor(copy_contexts_[stage].get()) == nullptr) {
        return;
    }
    const Device &device = *placements_[stage].device;
    Buffer buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(copy_contexts_[stage].get(), device.buffer_type()));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating F16 copies of the weights failed", device.name.c_str());
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers_.push_back(std::move(buffer));
}

void Model::stand_in() {
    for (auto &[tensor, source, slice] : tensors_) {
        tensor->data = const_cast<uint8_t *>(source->data);
        if (ggml_tensor *copy = copy_of(tensor)) {
            copy->data = tensor->data;
        }
    }
}

// Takes a device's memory for the packed matrices that lie there, one behind the other, or pinned memory for those of experts
// at home.
void Model::place_packed(uint32_t stage, bool at_home) {
    const Device &device = *placements_[stage].device;
    ggml_backend_buffer_type_t type = device.buffer_type();
    const auto lies_here = [&](const ggml_tensor *t) {
        return is_packed(t) && luce::stage_of(t) == stage && is_at_home(t) == at_home;
    };
    const auto room = [&](const ggml_tensor *t) { // ggml may clear what it takes for the padding of a tensor
        const uint64_t size = std::max<uint64_t>(packed_bytes(t), ggml_backend_buft_get_alloc_size(type, t));
        return (size + 255) / 256 * 256;
    };
    uint64_t total = 0;
    for (auto &[tensor, source, slice] : tensors_) {
        total += lies_here(tensor) ? room(tensor) : 0;
    }
    if (total == 0) {
        return;
    }
    Buffer buffer =
        at_home ? pinned(device, total, "the model's experts") : allocate(device, total, "the weights");
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    uint8_t *at = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer.get()));
    for (auto &[tensor, source, slice] : tensors_) {
        if (lies_here(tensor)) {
            ggml_backend_tensor_alloc(buffer.get(), tensor, at);
            at += room(tensor);
        }
    }
    buffers_.push_back(std::move(buffer));
}

static bool is_in_one_piece(const Slice &slice, const ggml_tensor *part) {
    return slice.piece == 0 || slice.piece == ggml_nbytes(part);
}

// Places tensors where the files are mapped: all, or experts that stay in host memory.
void Model::place_mapped(bool all) {
    std::vector<const Mapping *> parts;
    std::vector<std::shared_ptr<GgufFile>> files = drafter_files_;
    files.insert(files.begin(), file_);
    for (const std::shared_ptr<GgufFile> &file : files) {
        for (const auto &part : file->parts()) {
            parts.push_back(part.get());
        }
    }
    for (const Mapping *part : parts) {
        void *base = const_cast<uint8_t *>(part->data());
        buffers_.emplace_back(ggml_backend_cpu_buffer_from_ptr(base, part->size()));
        for (auto &[tensor, source, slice] : tensors_) {
            if ((all || is_in_ram(tensor)) && source->data >= part->data() &&
                is_in_one_piece(slice, tensor) && source->data < part->data() + part->size()) {
                ggml_backend_tensor_alloc(buffers_.back().get(), tensor,
                                          const_cast<uint8_t *>(source->data) + slice.first);
            }
        }
    }
}

// Copies what lies in pieces in the mapping.
void Model::place_slices() {
    const auto room = [](const ggml_tensor *t) { return (ggml_nbytes(t) + 255) / 256 * 256; };
    uint64_t total = 0;
    for (const auto &[tensor, source, slice] : tensors_) {
        total += is_in_one_piece(slice, tensor) ? 0 : room(tensor);
    }
    if (total == 0) {
        return;
    }
    buffers_.push_back(allocate(*placements_[0].device, total, "parts of the weights"));
    auto *at = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffers_.back().get()));
    for (auto &[tensor, source, slice] : tensors_) {
        if (!is_in_one_piece(slice, tensor)) {
            ggml_backend_tensor_alloc(buffers_.back().get(), tensor, at);
            copy_slice(slice, source->data, 0, ggml_nbytes(tensor), at);
            at += room(tensor);
        }
    }
}

void Model::load(const std::function<bool(float)> &progress) {
    if (!gpu()) {
        place_mapped(true);
        place_slices();
        if (!progress(1.0f)) {
            fail(LUCE_E_CANCELLED, "loading was cancelled");
        }
        return;
    }
    place_mapped(false);
    uint64_t total = 0, done = 0;
    for (auto &[tensor, source, slice] : tensors_) {
        total += is_in_ram(tensor) ? 0 : ggml_nbytes(tensor);
    }
    for (uint32_t stage = 0; stage < placements_.size(); stage++) {
        done += upload_stage(
            stage, [&](uint64_t here) { return progress(float(double(done + here) / double(total))); });
    }
}

// Places what lies on one device and is not in host memory, and returns the bytes that went there.
uint64_t Model::upload_stage(uint32_t stage, const std::function<bool(uint64_t)> &progress) {
    const Device &device = *placements_[stage].device;
    // A packed matrix passes through staging, and what goes home once more.
    uint64_t staging_size = 0, home_size = 0, need = 0, total = 0, at_home = 0;
    for (auto &[tensor, source, slice] : tensors_) {
        if (luce::stage_of(tensor) == stage && !is_in_ram(tensor)) {
            need += bytes_of(tensor, true) + nbytes_or_0(copy_of(tensor));
            staging_size =
                is_packed(tensor) ? std::max<uint64_t>(staging_size, ggml_nbytes(tensor)) : staging_size;
            home_size = is_at_home(tensor) ? std::max(home_size, packed_bytes(tensor)) : home_size;
            at_home += is_at_home(tensor) ? packed_bytes(tensor) : 0;
        }
    }
    staging_size = (staging_size + 255) / 256 * 256;
    check_memory(device, need + staging_size + home_size, "loading the model's weights");
    place_packed(stage, false);
    if (at_home > 0) {
        check_memory(find_device("cpu"), at_home, "keeping all experts in host memory");
    }
    place_packed(stage, true);
    place_copies(stage);
    ggml_context *context = contexts_[stage].get();
    Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context, device.buffer_type()));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating %s for the weights failed", device.name.c_str(),
             human_bytes(need).c_str());
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers_.push_back(std::move(buffer));
    const Buffer staging = allocate(device, staging_size + home_size, "the weights on their way");
    const Context staging_context = new_context(ggml_tensor_overhead() * 2);
    const auto staged = [&](uint64_t at, uint64_t size) {
        ggml_tensor *t =
            ggml_new_tensor_1d(staging_context.get(), GGML_TYPE_I8, int64_t(std::max(size, uint64_t(1))));
        uint8_t *base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(staging.get()));
        ggml_backend_tensor_alloc(staging.get(), t, base + at);
        return t;
    };
    ggml_tensor *through = staged(0, staging_size);
    ggml_tensor *through_home = home_size > 0 ? staged(staging_size, home_size) : nullptr;
    std::vector<Upload> items;
    for (auto &[tensor, source, slice] : tensors_) {
        if (is_in_ram(tensor) || luce::stage_of(tensor) != stage) {
            continue;
        }
        const Recoding recoding = {source->type, tensor->type};
        if (is_packed(tensor)) {
            items.push_back({through, source->data, ggml_nbytes(tensor), recoding, tensor,
                             matrices_of(tensor).n, copy_of(tensor),
                             is_at_home(tensor) ? through_home : nullptr});
        } else {
            items.push_back({tensor, source->data, ggml_nbytes(tensor), recoding});
        }
        items.back().slice = slice;
        total += items.back().size;
    }
    upload(device, items, progress);
    return total;
}

} // namespace luce
