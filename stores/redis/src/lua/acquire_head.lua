-- Answers many asks, each for a lock or for several of one slot. KEYS: counter, watched, then L, M and Q of each name of
-- each ask. ARGV: the highest fence seen, the client, the base, the claim; then for each ask its attempt, how long its key
-- is to live (ttl and delay), and the rest of it: what M begins with, whether it waits (2: and was called), how many names it has, its
-- minimum, the fence it is to be raised to, its terms (see HOLD).
local COUNTER, WATCHED, floor = KEYS[1], KEYS[2], tonumber(ARGV[1])
local answers, rest = {}, {}

-- First those that find their one lock free, and no line before it: the plain pattern, and the fence with it.
local lines = {}
for i = 5, #KEYS, 3 do lines[#lines + 1] = KEYS[i] end
local nobody_waits = redis.call('EXISTS', unpack(lines)) == 0
local us, ms, fence, watched
local at = 3
for i = 1, (#ARGV - 4) / 3 do
  local attempt, px, blob = ARGV[3 * i + 2], ARGV[3 * i + 3], ARGV[3 * i + 4]
  local _, stage, count = string.byte(blob, 1, 3)
  local served
  if stage == 2 and count == 1 then
    -- It was told that it has been let in, and says that it is there: from here on it has the whole of its ttl.
    local known = redis.call('MGET', KEYS[at], KEYS[at + 1], COUNTER)
    local value, meta = known[1], known[2]
    if value == attempt and meta and string.byte(meta) == 80 and string.sub(meta, 2, 33) == attempt
      and tonumber(known[3] or '0') >= floor then
      local time = redis.call('TIME')
      local ends = math.floor((time[1] * 1000000 + time[2]) / 1000) + struct.unpack('>I4', meta, 98)
      redis.call('PEXPIRE', KEYS[at], px)
      redis.call('SET', KEYS[at + 1], string.sub(meta, 1, 41) .. struct.pack('>d', ends) .. string.sub(meta, 50, 109)
        .. '\0' .. string.sub(meta, 111), 'PX', px)
      served = struct.unpack('>d', meta, 34)
    end
  end
  -- A server that is full refuses this, and whose the lock is, if it is taken, is found out below.
  local set = count == 1 and (nobody_waits or redis.call('EXISTS', KEYS[at + 2]) == 0)
    and redis.pcall('SET', KEYS[at], attempt, 'NX', 'PX', px)
  if set and set.ok then
    if not us then
      local time, known = redis.call('TIME'), redis.call('MGET', COUNTER, WATCHED)
      us, watched = time[1] * 1000000 + time[2], known[2]
      ms = math.floor(us / 1000)
      fence = math.max(known[1] or 0, us - 1, floor)
    end
    fence = fence + 1
    local hold, ttl = struct.unpack('>I4', blob, 4), struct.unpack('>I4', blob, 48)
    redis.call('SET', KEYS[at + 1], string.sub(blob, 1, 1) .. attempt
      .. struct.pack('>dddd', fence, ms + ttl, us, hold > 0 and ms + hold or 0) .. string.sub(blob, 16), 'PX', px)
    if watched then
      local _, _, _, _, _, _, info = struct.unpack('>c32I4I4I4BI4c0I2c0', blob, 16)
      redis.pcall('PUBLISH', watched, string.format('granted %.0f %.0f %d ', fence, us, #KEYS[at]) .. KEYS[at] .. info)
    end
    answers[i] = fence
  else
    answers[i] = 0
    rest[#rest + 1] = { i, at, count }
  end
  at = at + 3 * count
end
if fence then redis.call('SET', COUNTER, fence) end
if #rest == 0 then return answers end

local client, BASE, CLAIM = ARGV[2], ARGV[3], tonumber(ARGV[4])
local CLIENT = BASE .. 'client:' .. client
