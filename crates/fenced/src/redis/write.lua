-- KEYS: what is written, its mark. ARGV: the fence, SET | HSET | DEL, and what follows. Returns the mark that counts.
local seen = redis.call('GET', KEYS[2])
if seen then
  -- Fences are below 2^53: a double holds each of them exactly.
  local number = tonumber(seen)
  if not number then
    return redis.error_reply('LKFENCE the mark of this key is damaged')
  end
  if number > tonumber(ARGV[1]) then
    return seen
  end
end
-- The mark first: if the rest is refused, too much is kept out and not too little.
redis.call('SET', KEYS[2], ARGV[1])
if ARGV[2] == 'HSET' then
  -- Not all at once: a call takes some thousand words.
  for i = 3, #ARGV, 1000 do
    redis.call('HSET', KEYS[1], unpack(ARGV, i, math.min(i + 999, #ARGV)))
  end
else
  redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
end
return ARGV[1]
