# Copies the CUDA sources with mistakes planted in them: cmake -DFROM=csrc/cuda -DTO=folder -P cuda_mutations.cmake
#
# In the copies the n-th mistake is made where the variable `mutation` is n, so one program holds them all and a test can show
# that each is seen (test_cuda_mutations.cpp). A mistake is a piece of text and what stands in its place; a text that is not
# there exactly once stops the build, so that this list follows the sources.

set(count 0)
set(names "")
file(GLOB sources RELATIVE ${FROM} ${FROM}/*.cuh ${FROM}/*.cu ${FROM}/abi.h)
foreach(source IN LISTS sources)
  file(READ ${FROM}/${source} "text_${source}")
endforeach()

# The n-th mistake: `code` in place of `from`.
function(plant source what from code)
  set(text "${text_${source}}")
  string(FIND "${text}" "${from}" at)
  string(FIND "${text}" "${from}" last REVERSE)
  if(at EQUAL -1 OR NOT at EQUAL last)
    message(FATAL_ERROR "tests/cpp/cuda_mutations.cmake: csrc/cuda/${source} must hold this text exactly once, to plant \"${what}\":\n${from}")
  endif()
  string(REPLACE "${from}" "${code}" text "${text}")
  set("text_${source}" "${text}" PARENT_SCOPE)
endfunction()

# An expression in place of another one of its type.
macro(mutate source what from to)
  math(EXPR count "${count} + 1")
  plant(${source} "${what}" "${from}" "(mutation == ${count} ? (${to}) : (${from}))")
  string(APPEND names "    \"${source}: ${what}\",\n")
endmacro()

# A statement that is left out.
macro(leave_out source what from)
  math(EXPR count "${count} + 1")
  plant(${source} "${what}" "${from}" "if (mutation != ${count}) ${from}")
  string(APPEND names "    \"${source}: ${what}\",\n")
endmacro()

# ---- wrong spans ----
mutate(slot.cuh "a maximum over half the lanes" [=[span < lanes]=] [=[span < lanes / 2]=])
mutate(measure.cuh "a sum over half the lanes" [=[span < kLanes]=] [=[span < kLanes / 2]=])
mutate(measure.cuh "the high half of a sum is lost" [=[static_cast<uint64_t>(high) << 32]=] [=[static_cast<uint64_t>(0)]=])
mutate(step.cuh "a block's lanes counted twice" [=[slot.block / kEach]=] [=[slot.block / kEach * 2]=])
mutate(batch.cuh "half the ballots" [=[__popc(__ballot_sync(kAllLanes, before))]=] [=[__popc(__ballot_sync(kAllLanes, before) & 0xffffu)]=])

# ---- wrong random counters ----
mutate(slot.cuh "a counter of 32 bits" [=[static_cast<uint64_t>(w.job.first + at.row * w.job.global_cols + at.col)]=]
       [=[static_cast<uint64_t>(w.job.first + at.row * w.job.global_cols + at.col) & 0xffffffffu]=])
mutate(slot.cuh "the slot is left out" [=[static_cast<uint64_t>(slot) << 56]=] [=[static_cast<uint64_t>(slot - slot)]=])
mutate(slot.cuh "all groups get the first's bits" [=[first + static_cast<uint64_t>(i)]=] [=[first]=])
mutate(slot.cuh "elements of the first group are not skipped" [=[static_cast<int>(index & 7)]=] [=[0]=])
mutate(slot.cuh "state takes its neighbour's bits" [=[(skip + i) & 7]=] [=[(skip + i + 1) & 7]=])
mutate(tile.cuh "the parameter takes its neighbour's bits" [=[e & 7]=] [=[(e + 1) & 7]=])
mutate(step.cuh "the next group" [=[job.first + row * job.global_cols + col]=] [=[job.first + row * job.global_cols + col + 8]=])
mutate(step.cuh "the first element's bits for all" [=[random.bits16(e)]=] [=[random.bits16(0)]=])
mutate(batch.cuh "the step before" [=[static_cast<uint32_t>(t)]=] [=[static_cast<uint32_t>(t - 1)]=])
mutate(accumulate.cuh "the next group" [=[static_cast<uint64_t>(group)]=] [=[static_cast<uint64_t>(group + 1)]=])
mutate(accumulate.cuh "a step's bits" [=[kAccumulateSlot]=] [=[uint64_t{0}]=])

# ---- wrong ties ----
mutate(dynamic8.cuh "a tie goes down" [=[z >= t.from[code]]=] [=[z > t.from[code]]=])
mutate(codes.cuh "a tie goes down" [=[z >= boundary[code + step]]=] [=[z > boundary[code + step]]=])
mutate(step.cuh "a tie goes down" [=[z >= t.boundary[code + step]]=] [=[z > t.boundary[code + step]]=])
mutate(dynamic8.cuh "rounded down" [=[127.5f]=] [=[125.5f]=])

# ---- wrong tails ----
mutate(step.cuh "the last 8 values are missing" [=[col < job.cols]=] [=[col + kEach < job.cols]=])
mutate(tile.cuh "a chunk runs beyond its row" [=[tile.end - col < kTile ? tile.end - col : kTile]=] [=[tile.end - col + 1 < kTile ? tile.end - col + 1 : kTile]=])
mutate(tile.cuh "a row's last tile is missing" [=[lead + job.cols + job.tile - 1]=] [=[lead + job.cols]=])
mutate(slot.cuh "bits behind the last code are kept" [=[(e < count ? code : 0)]=] [=[code]=])
mutate(slot.cuh "the last byte of codes is not read" [=[b < bits && b < bytes]=] [=[b < bits && b + 1 < bytes]=])
mutate(slot.cuh "a block's end is taken for the chunk's" [=[end < at.n ? end : at.n]=] [=[end]=])
mutate(measure.cuh "the last row of a strip is missing" [=[tile.row < strip + rows]=] [=[tile.row + (rows > 1) < strip + rows]=])
mutate(measure.cuh "a strip runs beyond the last row" [=[ceil_div(job.rows, rows_in_strip(job))]=] [=[(job.rows / rows_in_strip(job))]=])
mutate(measure.cuh "the last columns are not settled" [=[ceil_div(job.inner_cols + job.inner_rows, kSettled)]=] [=[(job.inner_cols + job.inner_rows) / kSettled]=])
mutate(accumulate.cuh "the last group is missing" [=[groups_in_row(call.cols)]=] [=[groups_in_row(call.cols) - 1]=])
mutate(slot.cuh "the scale of a last short block is not written" [=[(end & (slot.block - 1)) == 0 || end == w.job.cols]=] [=[(end & (slot.block - 1)) == 0]=])

# ---- wrong offsets in tables that take more than one launch ----
mutate(step.cu "later jobs overwrite the first" [=[table.jobs + at]=] [=[table.jobs]=])
mutate(step.cu "later tiles overwrite the first" [=[table.ends + at]=] [=[table.ends]=])
mutate(step.cu "later ends overwrite the first" [=[table.matrix_ends + at]=] [=[table.matrix_ends]=])
mutate(step.cu "later moves overwrite the first" [=[table.moves + at]=] [=[table.moves]=])
mutate(step.cu "every launch takes the first jobs" [=[order.items[at + i]]=] [=[order.items[i]]=])
mutate(step.cu "every launch takes the first scales" [=[call.scales[at + i]]=] [=[call.scales[i]]=])
mutate(step.cu "every launch counts the first steps" [=[order.shared.begin() + at]=] [=[order.shared.begin()]=])
mutate(step.cu "a kernel's batch begins with the first job" [=[table.jobs + part.begin]=] [=[table.jobs]=])
mutate(step.cu "a kernel's batch counts the first tiles" [=[table.ends + part.begin]=] [=[table.ends]=])
mutate(batch.cuh "a job begins with the first tile" [=[i > 0 ? batch.ends[i - 1] : 0]=] [=[batch.ends[i] - batch.ends[i]]=])
mutate(batch.cuh "a job after an empty one is not found" [=[batch.ends[low + last - 1] <= tile]=] [=[batch.ends[low + last - 1] < tile]=])

# ---- the two walks over a tile of long blocks, and measured scales ----
mutate(slot.cuh "only the last chunk of a long block counts" [=[e.most > w.most[k][b] ? e.most : w.most[k][b]]=] [=[e.most]=])
mutate(slot.cuh "only the last chunk's least value counts" [=[e.least < w.least[k][b] ? e.least : w.least[k][b]]=] [=[e.least]=])
leave_out(step.cuh "maxima of the tile before stay" [=[forget_blocks(w, lane);]=])
mutate(slot.cuh "a long block takes the first one's scale" [=[whole && cut < 0 ? first / slot.block : 0]=] [=[0]=])
mutate(scales.cuh "the next row's maximum" [=[slot.row_next + at.row * slot.row_stride]=] [=[slot.row_next + (at.row ^ 1) % job.rows * slot.row_stride]=])
mutate(scales.cuh "the next column's maximum" [=[slot.col_next + col + e]=] [=[slot.col_next + (col + e + 1) % job.cols]=])
mutate(scales.cuh "the largest of the dimensions' maxima" [=[b < least ? b : least]=] [=[b]=])
mutate(scales.cuh "maxima of the step before stay" [=[s.most[d][i] = 0.0f]=] [=[s.most[d][i]]=])

# ---- exact sums ----
mutate(measure.cuh "a value's place in its word is forgotten" [=[t.mantissa << (t.position & 15)]=] [=[t.mantissa]=])
mutate(measure.cuh "a sum's place in its word is forgotten" [=[piece << (base & 15)]=] [=[piece]=])
mutate(measure.cuh "a column's place in its word is forgotten" [=[piece << (low & 15)]=] [=[piece]=])
mutate(measure.cuh "a column's upper pieces are lost" [=[k < 3 ? (sum[i] >> (16 * k)) & 0xffff : sum[i] >> 48]=] [=[k < 2 ? (sum[i] >> (16 * k)) & 0xffff : 0]=])
mutate(measure.cuh "a column's window has no end" [=[shift >= 0 && shift <= kAbove]=] [=[shift >= 0]=])
mutate(measure.cuh "the window is a row's, not a term's" [=[t.position >= base]=] [=[t.position >= base - 40]=])
mutate(measure.cuh "NaN is no number that counts" [=[words + ExactSum::kNonFinite]=] [=[words + 16]=])
mutate(measure.cuh "the next matrix's columns" [=[inner.matrix * (job.inner_cols + 1)]=] [=[inner.matrix * job.inner_cols]=])
mutate(measure.cuh "a job's totals go to the next one" [=[place.end != 0 && i >= place.end]=] [=[place.end < 0]=])
leave_out(measure.cuh "columns of the strip before stay" [=[own.columns.forget(lane);]=])

# ---- rows and blocks that are cut ----
mutate(tile.cuh "what lies before the first element" [=[at.row * job.cols + at.col - front]=] [=[at.row * job.cols + at.col]=])
mutate(tile.cuh "the first row is taken for whole" [=[row == 0 ? job.front : 0]=] [=[int64_t{0}]=])
mutate(tile.cuh "the last row is taken for whole" [=[row == job.rows - 1 ? job.cols - job.back : job.cols]=] [=[job.cols]=])
mutate(slot.cuh "blocks begin with the part" [=[job.first - divide(job.first, job.global_cols) * job.global_cols]=] [=[int64_t{0}]=])
mutate(slot.cuh "the least value of a cut block" [=[0x7fffffffu - rest]=] [=[0x70000000u - rest]=])
mutate(scales.cuh "the least value of a cut block" [=[0x7fffffffu - rest]=] [=[0x70000000u - rest]=])
mutate(scales.cuh "the first cut row's scales for all" [=[(row * blocks + b)]=] [=[b]=])
mutate(scales.cuh "the largest magnitude of the last chunk" [=[e.most > next[0] ? e.most : next[0]]=] [=[e.most]=])
leave_out(scales.cuh "the first rows instead of the cut ones" [=[tile.row = job.measured_row(tile.row, slots);]=])
mutate(step.cu "rows between cut ones begin too late" [=[room - whole.front]=] [=[room]=])
mutate(step.cu "the last row takes the first one's maxima" [=[2 * cut * blocks * 4]=] [=[int64_t{0}]=])
leave_out(step.cu "rows between cut ones get the first row's bits" [=[job.first += begin * whole.global_cols;]=])
mutate(step.cu "a job in parts counts as many steps" [=[parts.size() == 1]=] [=[true]=])
mutate(measure.cuh "a row that begins elsewhere counts here" [=[part.row > skipped ? part.row : skipped]=] [=[part.row]=])

# ---- every barrier, one at a time ----
# But those that only order memory, since lanes wait for each other elsewhere: here lanes run one after another.
foreach(source IN LISTS sources)
  foreach(barrier __syncwarp __syncthreads)
    set(before "")
    set(after "${text_${source}}")
    set(nth 0)
    string(FIND "${after}" "${barrier}();" at)
    while(NOT at EQUAL -1)
      math(EXPR nth "${nth} + 1")
      string(SUBSTRING "${after}" 0 ${at} part)
      string(LENGTH "${barrier}();" length)
      math(EXPR next "${at} + ${length}")
      string(SUBSTRING "${after}" ${next} -1 after)
      string(FIND "${after}" "  // memory order" order)
      if(order EQUAL 0)
        string(APPEND before "${part}${barrier}();")
      else()
        math(EXPR count "${count} + 1")
        string(APPEND before "${part}if (mutation != ${count}) ${barrier}();")
        string(APPEND names "    \"${source}: without ${barrier} ${nth}\",\n")
      endif()
      string(FIND "${after}" "${barrier}();" at)
    endwhile()
    set("text_${source}" "${before}${after}")
  endforeach()
endforeach()

foreach(source IN LISTS sources)
  file(WRITE "${TO}/cuda/${source}" "${text_${source}}")
endforeach()
file(WRITE "${TO}/mutations.inc" "const char* const kMutations[] = {\n    \"none\",\n${names}};\n")
