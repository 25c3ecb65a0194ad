local answer = { redis.call('PEXPIRE', BASE .. 'client:' .. ARGV[3], CLAIM) }
local keys = names_at(5, #KEYS - 4)
stay(keys)
serve(keys)
flush()
for i, key in ipairs(names_at(5, #KEYS - 4)) do
  answer[i + 1] = { redis.call('GET', key) or '', redis.call('HGET', HELD, key) or '',
    redis.call('PTTL', key) }
end
return answer
